"""Modules that run again from compressed inputs: same gradients, same chance, less memory."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sn_memory import BudgetError
from sn_memory.activations import AccuracyWarning
from sn_memory.torch import ReplayError, TraceError, compress_activations


class Block(nn.Module):
    """A residual block with all that could go wrong: chance, statistics, a ReLU, a norm."""

    def __init__(self, width=32, dropout=0.2):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = functional.gelu(self.back(functional.relu(self.wide(self.norm(x)))))
        return x + self.dropout(y)


class Net(nn.Module):
    def __init__(self, depth=3, block=Block):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.last = nn.Linear(32, 1)

    def forward(self, x):
        return self.last(self.blocks(self.first(x))).sum()


def gradients(model, x, seed=5, **backward):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(x).sum().backward(**backward)
    return [p.grad.clone() for p in model.parameters()]


def close(found, expected):
    """Within a tenth of the norm.

    Eight bits are an error of 1/255 of a group's range, a hundredth of its spread. Where a ReLU's
    input is that near to 0, in 1 of 100 elements, its gradient comes and goes: a tenth of the norm.
    """
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= 0.1 * float(b.norm()) + 1e-6


@pytest.mark.parametrize("training", [True, False])
def test_exactly_the_same_where_nothing_is_packed(training):
    """The unit is given the model's own input, and its inside fits in the budget as it is."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(Block(), Block())).train(training)
    model, x = copy.deepcopy(plain), torch.randn(64, 32)
    expected = gradients(plain, x)
    after = torch.rand(3)
    with compress_activations(model, budget="1 GiB", recompute=["0"]) as compressed:
        found = gradients(model, x)
        # The same chance: masks, and what is drawn afterwards.
        assert torch.equal(torch.rand(3), after)
        assert compressed.saved.compressed_bytes < 0.3 * compressed.saved.plain_bytes
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Statistics are updated once, in training only.
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)
    assert model[0][0].norm.num_batches_tracked == int(training)


def test_gradients_have_the_error_of_eight_bits():
    torch.manual_seed(0)
    plain = Net()
    model, x = copy.deepcopy(plain), torch.randn(128, 16)
    expected = gradients(plain, x)
    with compress_activations(model, bits=8, recompute=["blocks.1", "blocks.2"]) as compressed:
        found = gradients(model, x)
        keys = [row.key for row in compressed.controller.rows()]
        assert "blocks.1/input/0" in keys
        assert "runs again: blocks.1" in compressed.report()
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    close(found, expected)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


def test_units_inside_units_run_again_once():
    calls = []

    class Counted(Block):
        def forward(self, x):
            calls.append(self)
            return super().forward(x)

    model, x = Net(2, Counted), torch.randn(128, 16)
    with compress_activations(model, bits=8, recompute=["blocks", "blocks.0", "blocks.1.wide"]):
        gradients(model, x)
    # Twice each; the last block's second run ends when all that it saved is there.
    assert [calls.count(block) for block in model.blocks] == [2, 2]


def test_backward_twice_and_several_forwards_before():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(128, 16)
    with compress_activations(model, bits=8, recompute=["blocks.0", "blocks.2"]):
        torch.manual_seed(1)
        loss = model(x)
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        second = torch.autograd.grad(loss, weights)
        close(second, first)  # what is compressed inside is rounded anew
        model.eval()
        one, other = model(x), model(2 * x)
        late = torch.autograd.grad(other, weights), torch.autograd.grad(one, weights)
        close(late[1], torch.autograd.grad(model(x), weights))
        close(late[0], torch.autograd.grad(model(2 * x), weights))


def test_beside_the_users_own_checkpoints():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.after = Block(dropout=0.0), Block(dropout=0.0)

        def forward(self, x):
            return self.after(checkpoint(self.inside, x, use_reentrant=False))

    torch.manual_seed(0)
    plain = Net(2, Checkpointed)
    x = torch.randn(128, 16)
    expected = gradients(plain, x)
    for names in (["blocks.0"], ["blocks.0.inside", "blocks.1.after"]):
        model = copy.deepcopy(plain)
        with compress_activations(model, bits=8, recompute=names):
            close(gradients(model, x), expected)


def test_the_noise_of_rrelu_is_kept_when_it_is_written():
    """Its kernel fills what autograd saved before it ran: gradients were infinite."""
    torch.manual_seed(0)
    parts = (nn.Linear(32, 64), nn.RReLU(0.1, 0.9), nn.Linear(64, 32), nn.RReLU(0.1, 0.9))
    plain = nn.Sequential(nn.Sequential(*parts), nn.Linear(32, 4))
    model, x = copy.deepcopy(plain), torch.randn(128, 32)
    expected = gradients(plain, x)
    with compress_activations(model, bits=8) as compressed:
        close(gradients(model, x), expected)
        assert compressed.saved.ratio > 1
    # A second run draws by values that were rounded.
    with (
        compress_activations(model, bits=8, recompute=["0"]),
        pytest.raises(ReplayError, match="rrelu draws a random number for each value"),
    ):
        model(x)
    with compress_activations(model, budget="100 KiB") as compressed:
        for _ in range(3):
            gradients(model, x)
        assert not compressed.controller.again


def test_what_cannot_be_run_again_is_told():
    class InPlace(Block):
        def forward(self, x):
            return super().forward(x.mul_(2))

    class Counts(Block):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x) if self.count % 2 else x * self.wide.weight.sum()

    x = torch.randn(128, 16)
    model = Net(1, InPlace)
    with (
        compress_activations(model, bits=8, recompute=["blocks.0"]),
        pytest.raises(ReplayError, match="changes its input in place"),
    ):
        model(x)
    model = Net(1, Counts)
    with (
        compress_activations(model, bits=8, recompute=["blocks.0"]),
        pytest.raises(ReplayError, match="saved something else"),
    ):
        model(x).backward()
    model = Net(1)
    with compress_activations(model, bits=8, recompute=["blocks.0"]):
        loss = model(x)
        with torch.no_grad():
            model.blocks[0].wide.weight.add_(1)
        with pytest.raises(ReplayError, match="changed after its forward pass"):
            loss.backward()
    for names in (["blocks.7"], [""]):
        with pytest.raises(ValueError, match="expected modules inside the model"):
            compress_activations(model, bits=8, recompute=names)


def test_forward_passes_are_the_models_own_between_steps():
    model, x = Net(), torch.randn(128, 16)
    compressed = compress_activations(model, bits=8, recompute=["blocks.0"])
    loss = model(x)
    assert "forward" not in vars(model.blocks[0])
    with pytest.raises(RuntimeError):
        model(torch.randn(128, 17))
    assert "forward" not in vars(model.blocks[0])
    compressed.close()
    loss.backward()  # what was promised is still made
    assert model.blocks[0].wide.weight.grad is not None


def test_a_budget_is_kept_without_linear_layers_too():
    norms = nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.LayerNorm(64), nn.GELU())
    model, x = nn.Sequential(nn.LayerNorm(64), norms, nn.LayerNorm(64)), torch.randn(512, 64)
    budget = int(plain_bytes(model, x) / 8)
    with compress_activations(model, budget=budget) as compressed:
        for _ in range(2):
            gradients(model, x)
        assert compressed.controller.again == {"1"}
        assert compressed.saved.compressed_bytes <= budget


def encoder(depth=6, dropout=0.1):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def plain_bytes(model, x):
    with compress_activations(model, bits=8) as compressed:
        model(x)
    return compressed.saved.plain_bytes


@pytest.mark.parametrize("ratio", [8, 13.5])
def test_a_transformer_keeps_eight_bits_and_the_peak_falls_as_predicted(ratio):
    """What is not linear has 8 bits or runs again; the measured saving is the predicted one."""
    model, x = encoder(), torch.randn(16, 32, 64)
    budget = int(plain_bytes(model, x) / ratio)
    with compress_activations(model, budget=budget) as compressed:
        for _ in range(2):
            gradients(model, x)
        assert compressed.saved.compressed_bytes <= budget
        assert compressed.controller.again
        linear = ("linear/0", "matmul/0")
        for row in compressed.controller.rows():
            assert row.bits == 8 or row.key.endswith(linear), row.key
        found = compressed.verify(x)
        assert found.predicted_bytes == compressed.predict(x)
    # Here and there a gradient waits for another; a twentieth is more than was ever seen.
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.05)
    assert found.kept_to >= 0.85
    # Six layers deep, little is decompressed beside what is saved.
    activations = found.plain_bytes - found.base_bytes
    assert found.plain_bytes - found.measured_bytes > 0.6 * activations
    assert "of the predicted saving" in str(found)


def test_fewer_bits_only_if_asked_for():
    model, x = encoder(2, dropout=0.0), torch.randn(16, 32, 64)
    budget = int(plain_bytes(model, x) / 13)
    with compress_activations(model, budget=budget, recompute="never"):
        gradients(model, x)
        with pytest.raises(BudgetError, match="least_nonlinear_bits"):
            model(x)
    settings = {"recompute": "never", "least_nonlinear_bits": 2}
    with compress_activations(model, budget=budget, **settings) as compressed:
        gradients(model, x)
        with pytest.warns(AccuracyWarning, match="leaves 2 bits"):
            gradients(model, x)
        assert compressed.saved.compressed_bytes <= budget


def test_units_that_cannot_be_repeated_are_not_chosen():
    class Draws(Block):
        def forward(self, x):
            return super().forward(x) * (1 + 0 * random.random())

    class Remembers(Block):
        def forward(self, x):
            self.seen = x.shape
            return super().forward(x)

    x = torch.randn(512, 16)
    for block in (Draws, Remembers):
        model = Net(3, block)
        budget = int(plain_bytes(model, x) / 6)
        with compress_activations(model, budget=budget, least_nonlinear_bits=2) as compressed:
            gradients(model, x)
            compressed.refresh()
            assert not any(name.count(".") < 2 for name in compressed.controller.again)


@pytest.mark.parametrize("kind", ["convolutions", "blocks"])
def test_peaks_are_predicted_without_memory(kind):
    if kind == "blocks":
        model, x = Net(), torch.randn(256, 16)
    else:
        x = torch.randn(8, 3, 32, 32)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 10),
        )  # fmt: skip
    with compress_activations(model, bits=4) as compressed:
        model(x).sum().backward()
        buffers = [it.clone() for it in model.buffers()]
        model.zero_grad(set_to_none=True)
        found = compressed.verify(x)
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.02)
    assert found.measured_bytes < found.plain_bytes
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_a_model_that_looks_at_values_cannot_be_predicted():
    class Looks(Net):
        def forward(self, x):
            y = super().forward(x)
            return y * 2 if y > 0 else y

    model, x = Looks(), torch.randn(128, 16)
    with compress_activations(model, bits=8) as compressed:
        model(x).backward()
        with pytest.raises(TraceError, match="depend on values"):
            compressed.predict(x)
        model(x).backward()  # and all is as it was


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_a_relu_reads_bits(dtype, last):
    """The gradient is bit-equal to torch's, its gradient too; the mask takes 1 bit."""
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(4, 8, 16, 16).to(dtype, memory_format=form)
    x[0, 0, 0, :2] = torch.tensor([float("nan"), 0.0])
    x.requires_grad_()
    weight = torch.randn(16, 16, 8, 4).to(dtype).permute(3, 2, 0, 1)  # lies otherwise than x

    class Relu(nn.Module):
        def forward(self, x):
            return torch.relu(x * 1)

    model = Relu()

    def twice():
        (once,) = torch.autograd.grad((model(x) * weight).sum(), x, create_graph=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y, x, weight.clone().requires_grad_(), create_graph=True)
        return once, slope

    expected = twice()
    with compress_activations(model, bits=8) as compressed:
        found = twice()
        assert compressed.saved.compressed_bytes == x.numel() / 8
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
