"""Compressed activations in torch: the error is the predicted one, the memory is really free."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from itertools import count

import numpy as np
import pytest
import torch
from late_imports import Late
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sn_memory import BudgetError, settings
from sn_memory.torch import ReplayError, StorageTracker, TraceError, compress_activations
from sn_memory.torch.activations import compress, saving
from sn_memory.torch.activations.saving import MIN_ELEMENTS
from sn_memory.torch.activations.treatments import Mask, OnHost

stats = Late("scipy.stats")


@pytest.fixture(autouse=True)
def modules_take_no_time(monkeypatch):
    """What runs again is chosen by seconds, which are not the same twice: here by bytes alone."""
    monkeypatch.setattr(compress, "now", lambda device: 0.0)


@pytest.fixture
def modules_take_long(monkeypatch):
    clock = count()
    monkeypatch.setattr(compress, "now", lambda device: float(next(clock)))


class Net(nn.Module):
    """Convolutions (one with a stride), pooling, dropout and linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=1, stride=2)
        self.conv3 = nn.Conv2d(24, 16, (3, 1), padding="same")
        self.fc = nn.Linear(16 * 4 * 4, 64)
        self.out = nn.Linear(64, 10)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = functional.max_pool2d(functional.relu(self.conv3(x)), 2)
        return self.out(self.dropout(functional.relu(self.fc(x.flatten(1)))))


def batch(n=64, size=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, size, size, generator=generator)
    return x, torch.randint(10, (n,), generator=generator)


def train(model, steps, data, optimizer):
    x, y = data
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("bits", [2, 8])
def test_error_of_gradients_is_the_predicted_one_and_normal(bits):
    """Within 10 %, on a net that has trained a little; of each entry the errors are normal.

    Kolmogorov and Smirnov's test of 8 entries in each of 2 layers: a false alarm in 2e-5. Entries
    of linear layers, to which few of the 64 samples contribute, have errors of few values.
    """
    model, data = Net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with compress_activations(model, bits=bits, optimizer=optimizer, every=1) as compressed:
        train(model, 5, data, optimizer)
        loss = lambda: functional.cross_entropy(model(data[0]), data[1])  # noqa: E731
        loss().backward()
        compressed.refresh()
        predicted = {
            row.key.split("/")[0]: row.predicted_sd() for row in compressed.controller.rows()
        }
        errors = compressed.measure(loss, repeats=60)
    measured = {row.key.split("/")[0]: row.measured_sd for row in compressed.controller.rows()}
    assert predicted.keys() == {"conv2", "conv3", "fc", "out"}
    for layer, sd in predicted.items():
        assert measured[layer] == pytest.approx(sd, rel=0.1), layer
        each = errors[f"{layer}.weight"].double().flatten(1).numpy()
        alive = np.flatnonzero(each.std(axis=0) > 0.5 * sd)
        for entry in alive[:: len(alive) // 8][:8] if layer.startswith("conv") else ():
            scaled = (each[:, entry] - each[:, entry].mean()) / each[:, entry].std(ddof=1)
            assert stats.kstest(scaled, "norm").pvalue > 1e-6
        # Unbiased: six deviations, in a random direction; repeats are independent.
        along = each @ np.random.default_rng(0).standard_normal(each.shape[1])
        assert abs(along.mean()) < 6 * along.std(ddof=1) / np.sqrt(len(along))
    assert errors["conv1.weight"].std() == 0  # its input is the user's and is left alone


def draws_of(device):
    """Return the next draws of all generators that a model on a device may use."""
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    return state.tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_measuring_errors_puts_all_random_numbers_back(device):
    model, (x, y) = Net().to(device), batch()
    x, y = x.to(device), y.to(device)

    def loss():
        torch.rand(random.randrange(2, 9), device=device)
        np.random.rand()  # noqa: NPY002
        return functional.cross_entropy(model(x), y)

    with compress_activations(model, bits=4) as compressed:
        before = draws_of(device)
        compressed.measure(loss, repeats=2)
        assert draws_of(device) == before


def test_what_flows_back_is_exact_where_ops_ask_for_signs_and_masks():
    """Only gradients of weights have errors: ReLU, dropout and pooling have what they need."""
    model, (x, y) = Net(), batch(16)
    x.requires_grad_()

    def gradient():
        torch.manual_seed(3)
        return torch.autograd.grad(functional.cross_entropy(model(x), y), [x, model.out.bias])

    plain = gradient()
    with compress_activations(model, bits=1):
        compressed = gradient()
    assert all(torch.equal(a, b) for a, b in zip(plain, compressed, strict=True))


def test_memory_really_falls_by_what_is_predicted():
    """Of the peak of a step, at least 85 % of the saving that `saved` reports."""
    layers = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    model, (x, _) = nn.Sequential(*layers), batch(32)

    def peak():
        model.zero_grad(set_to_none=True)
        known = [x, *model.parameters()]
        with StorageTracker(known) as tracker:
            # The peak of what is held between the passes, where activations are what there is.
            loss = model(x).sum()
            held = tracker.live_bytes
            loss.backward()
        return held, tracker.peak_bytes

    plain_held, plain_peak = peak()
    with compress_activations(model, bits=2) as compressed:
        held, compressed_peak = peak()
    saving = compressed.saved.saving_bytes
    assert saving > 0.8 * compressed.saved.plain_bytes
    assert plain_held - held >= 0.85 * saving
    # Backward needs one or two plain tensors of the size of a layer's, which are transient.
    layer = 32 * 32 * 16 * 16 * 4
    assert plain_peak - compressed_peak >= 0.85 * saving - 2 * layer


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        a, b, c = (part(x) for part in self.parts)
        return a + b + c + self.parts[0](x.view(32, 8, 64)).view(-1, 64)


def test_a_storage_is_packed_once_views_too():
    model = Shared()
    with compress_activations(model, bits=4) as compressed:
        model(torch.randn(256, 64)).sum().backward()
    n = 256 * 64
    assert compressed.saved.plain_bytes == 4 * n
    # Four bits, 48 for each group of 256, and hardly an escape.
    assert compressed.saved.compressed_bytes == n // 2 + 6 * n // 256
    assert compressed.saved.elements == 4 * n


def test_parameters_inputs_and_small_tensors_are_left_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(256, 64)
    with compress_activations(model, bits=1, nonlinear_bits=8) as compressed:
        model(x).sum().backward()
        assert [row.key for row in compressed.controller.rows()] == ["1/tanh/0"]
        model(torch.randn(MIN_ELEMENTS // 64 - 1, 64)).sum().backward()
        assert compressed.saved.ratio == 1


def test_changes_in_place_are_seen():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = self.a(x)
            y = self.b(x)  # saves x
            x = x.mul_(2)  # and then another version of it
            return y + self.b(x)

    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(64, 64)
    with compress_activations(model, bits=8) as compressed:
        model(x).sum().backward()
    # Two versions, compressed twice: plain autograd would raise an error.
    assert compressed.saved.compressed_bytes == 2 * (4096 + 6 * 16)
    # The gradient is dY^T (x + 2 x), each as it was when saved.
    inner = model.a(x).detach()
    exact = torch.ones(64, 64).T @ (inner + 2 * inner)
    assert torch.allclose(model.b.weight.grad, exact, rtol=0, atol=0.02 * float(exact.abs().max()))

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = torch.exp(self.w * x)
            y.mul_(2)
            return y

    small = Small()
    with compress_activations(small, bits=8), pytest.raises(ReplayError, match="changed in place"):
        small(torch.ones(3)).sum().backward()


def test_names_do_not_depend_on_what_else_runs():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, *, left):
            x = self.first(x)
            return self.right(self.left(x) if left else x)

    model, x = Branches(), torch.randn(64, 64)
    with compress_activations(model, bits=4) as compressed:
        model(x, left=False).sum().backward()
        model(x, left=True).sum().backward()
    keys = [row.key for row in compressed.controller.rows()]
    assert keys == ["right/linear/0", "left/linear/0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_packed_as_well(dtype):
    model = Shared().to(dtype)
    x = torch.randn(256, 64).to(dtype)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with compress_activations(model, bits=4) as compressed:
        model(x).sum().backward()
    assert compressed.saved.ratio > 3.7
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad.dtype == dtype
        scale = float(b.grad.float().abs().max())
        assert float((a.grad - b.grad).float().abs().max()) < 0.2 * scale


def test_channels_last_and_transposes_keep_their_layout():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    x = batch(8)[0].contiguous(memory_format=torch.channels_last)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with compress_activations(model, bits=8) as compressed:
        found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert compressed.saved.ratio > 3.5
    for a, b in zip(found, plain, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=0.02 * float(b.abs().max()) + 1e-4)


def test_too_many_escapes_keep_the_tensor_and_then_for_good(modules_take_long):
    model, x = Shared(), torch.randn(256, 64)
    x[::8] = float("nan")
    with compress_activations(model, bits=2, overflow_limit=2) as compressed:
        for expected in (1, 1):
            model(x).sum().backward()
            assert compressed.saved.ratio == expected
        model(torch.randn(256, 64)).sum().backward()
        assert compressed.saved.ratio == 1
        rows = compressed.controller.rows()
        assert {row.key.split("/")[0] for row in rows} == {"parts.0", "parts.1", "parts.2"}
        assert all(compressed.controller.bits(row.key) is None for row in rows)
    assert torch.isnan(model.parts[0].weight.grad).all()


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "Adam"])
def test_error_is_kept_to_by_the_bits_chosen(name):
    model, data = Net(), batch()
    settings = {"lr": 0.01} | ({"momentum": 0.9} if "momentum" in name else {})
    optimizer = getattr(torch.optim, name.split()[0])(model.parameters(), **settings)
    with compress_activations(model, error=0.05, optimizer=optimizer, every=4) as compressed:
        train(model, 6, data, optimizer)
        compressed.measure(lambda: functional.cross_entropy(model(data[0]), data[1]), repeats=4)
    for row in compressed.controller.rows():
        assert row.bits < 8 or row.predicted_sd(4) > 0.05 * row.yardstick
        # dY has changed since the statistics, and few repeats are measured.
        assert row.measured_sd < 2 * 0.05 * row.yardstick
    state = optimizer.state[model.fc.weight]
    if name == "Adam":
        alive = state["exp_avg_sq"] > 0
        step = (state["exp_avg"][alive].abs() / state["exp_avg_sq"][alive].sqrt()).sum()
        expected = step / alive.numel() * state["exp_avg_sq"].mean().sqrt()
        assert compressed._yardstick(model.fc.weight) == pytest.approx(float(expected))
    elif "momentum" in name:
        expected = float(state["momentum_buffer"].abs().mean())
        assert compressed._yardstick(model.fc.weight) == pytest.approx(expected)


def test_a_budget_is_kept_after_the_first_step():
    model, data = Net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with compress_activations(model, bits=8) as compressed:
        train(model, 1, data, optimizer)
        plain = compressed.saved.plain_bytes
    for ratio in (5, 8):
        with compress_activations(model, budget=plain // ratio) as compressed:
            train(model, 3, data, optimizer)
        assert compressed.saved.compressed_bytes <= plain // ratio
        assert compressed.saved.compressed_bytes > 0.5 * plain / ratio


def test_the_papers_form_trains_too():
    model, data = Net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kinds = set()
    for theory in ("exact", "paper"):
        with compress_activations(
            model, error=0.05, optimizer=optimizer, form="paper", theory=theory, every=2
        ) as compressed:
            train(model, 6, data, optimizer)
            compressed.measure(lambda: functional.cross_entropy(model(data[0]), data[1]), repeats=4)
        assert compressed.saved.ratio > 4
        kinds |= {row.key for row in compressed.controller.rows() if row.measured_sd > 0}
    assert kinds >= {"conv2/conv2d/0", "fc/linear/0"}
    with pytest.raises(ValueError, match="paper together with error="):
        compress_activations(model, bits=2, form="paper")


def test_it_ends_and_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x, fail=False):
            x = self.inner(self.inner(x))
            if fail:
                raise KeyError("mine")
            return x

    model, x = Fails(), torch.randn(64, 64)
    compressed = compress_activations(model, bits=2)
    with pytest.raises(KeyError, match="mine"):
        model(x, fail=True)
    y = torch.randn(64, 64, requires_grad=True)
    assert torch.equal(torch.autograd.grad((y * y).sum(), y)[0], 2 * y)  # outside: untouched
    with torch.no_grad():
        model(x)
    model(x).sum().backward()
    assert compressed.saved.ratio > 10
    compressed.close()
    assert not model._forward_hooks
    assert not model.inner._forward_pre_hooks
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.zero_grad()
        each(x).sum().backward()
    assert torch.equal(model.inner.weight.grad, plain.inner.weight.grad)


def test_checkpoints_inside_are_left_to_themselves():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            self.b = nn.Linear(64, 64)

        def forward(self, x):
            return self.b(checkpoint(self.a, self.b(x), use_reentrant=False))

    model, x = Checkpointed(), torch.randn(256, 64)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with compress_activations(model, bits=8):
        found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for a, b in zip(found, plain, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=0.02 * float(b.abs().max()))


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (1, 2), "stride": (2, 1)},
        {"kernel_size": 3, "stride": 1, "dilation": 2, "ceil_mode": True},
        {"kernel_size": 5, "stride": 3},  # more than 16 places: a smaller integer
    ],
)
def test_indices_of_pooling_come_back(settings):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(**settings))
    for form in (torch.contiguous_format, torch.channels_last):
        x = batch(16)[0].contiguous(memory_format=form).requires_grad_()
        weight = torch.randn(model(x).shape)
        plain = torch.autograd.grad((model(x) * weight).sum(), x)[0]
        with compress_activations(model, bits=8) as compressed:
            found = torch.autograd.grad((model(x) * weight).sum(), x)[0]
        assert torch.equal(found, plain)
        assert compressed.saved.ratio > 8


def test_compiled_models_are_refused():
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    with pytest.raises(TraceError, match="eager one"):
        compress_activations(model, bits=2)


def plain_bytes(model, x):
    with compress_activations(model, bits=8) as compressed:
        model(x)
    return compressed.saved.plain_bytes


def test_a_budget_holds_without_linear_layers_too():
    model = nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.LayerNorm(64), nn.GELU())
    x = torch.randn(512, 64)
    plain = plain_bytes(model, x)
    with compress_activations(model, budget=plain // 3) as compressed:
        for _ in range(2):
            model(x).sum().backward()
        assert compressed.saved.compressed_bytes <= plain // 3
    with compress_activations(model, budget=plain // 8):
        model(x).sum().backward()
        with pytest.raises(BudgetError, match="least_nonlinear_bits"):
            model(x)


def test_the_noise_of_rrelu_is_kept_when_it_is_written():
    """Its kernel fills what autograd saved before it ran: gradients were infinite."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.RReLU(0.1, 0.9), nn.Linear(64, 32), nn.RReLU())
    model, x = copy.deepcopy(plain), torch.randn(128, 32)

    def gradients(model):
        torch.manual_seed(5)
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    expected = gradients(plain)
    with compress_activations(model, bits=8) as compressed:
        found = gradients(model)
        assert compressed.saved.ratio > 1
    # Eight bits are an error of 1/255 of a group's range, a hundredth of its spread.
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= 0.1 * float(b.norm()) + 1e-6


@pytest.mark.parametrize(
    ("dtype", "last", "relu"),
    [(torch.float32, False, torch.relu), (torch.bfloat16, True, torch.relu_)],
)
def test_a_relu_reads_bits(dtype, last, relu, modules_take_long):
    """The gradient is bit-equal to torch's, its gradient too; the mask takes 1 bit."""
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(4, 8, 16, 16).to(dtype, memory_format=form)
    x[0, 0, 0, :2] = torch.tensor([float("nan"), 0.0])
    x.requires_grad_()
    weight = torch.randn(16, 16, 8, 4).to(dtype).permute(3, 2, 0, 1)  # lies otherwise than x

    class Relu(nn.Module):
        def forward(self, x):
            return relu(x * 1)

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


def test_running_again_is_refused_with_what_to_write_instead():
    with pytest.raises(ValueError, match=r"recompute=.*sn_memory\.torch\.plan\(model, sample"):
        compress_activations(nn.Linear(4, 4), bits=8, recompute="never")


class Noisy(torch.nn.Module):
    """An activation of several ops, one of them random."""

    def forward(self, x):
        return torch.nn.functional.dropout(x * torch.tanh(0.5 * x) * torch.sigmoid(x), 0.2)


def test_an_activation_of_many_ops_keeps_its_input_alone():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), Noisy(), torch.nn.Linear(256, 8))
    x = torch.randn(128, 64)

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    with compress_activations(model, bits=8) as compressed:
        gradients()
        before = compressed.saved
        assert compressed.rerun == ["1"]
        for _ in range(2):
            again = gradients()
            for ours, theirs in zip(again, plain, strict=True):
                # With other draws of dropout in the backward pass a fifth of them would be gone.
                assert (ours - theirs).norm() < 0.02 * theirs.norm()
        assert compressed.saved.plain_bytes == before.plain_bytes
        assert compressed.saved.compressed_bytes < 0.6 * before.compressed_bytes
        assert compressed.controller.total_bytes == compressed.saved.compressed_bytes
        assert "run again" in compressed.report()
    assert "forward" not in vars(model[1])
    for ours, theirs in zip(gradients(), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_modules_that_keep_little_do_not_run_again():
    layers = [torch.nn.ReLU(), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.LayerNorm(64)]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), *layers, torch.nn.Linear(64, 4))
    with compress_activations(model, bits=4) as compressed:
        model(torch.randn(64, 64)).sum().backward()
        assert compressed.rerun == []


class Gate(torch.nn.Module):
    """An activation of several ops, which runs again from the second pass on."""

    def forward(self, x):
        return self.factor(x) * torch.tanh(0.5 * x) * torch.sigmoid(x)

    def factor(self, x):
        return x


def gated(gate):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), gate, torch.nn.Linear(64, 8))


def step(model, x, between=lambda: None):
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x).square().mean()
    between()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


class Selects(Gate):
    def factor(self, x):
        return torch.zeros_like(x).masked_scatter(x > 0.3, x[x > 0.3].square())


class Branches(Gate):
    def factor(self, x):
        return x.square() if x.square().mean() > self.mean else x


class Draws(Gate):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def factor(self, x):
        return torch.rand(x.shape, generator=self.generator.manual_seed(int(self.training)))


class DrawsOutside(Gate):
    def factor(self, x):
        return x * np.random.default_rng().random() + x * np.random.random()  # noqa: NPY002


class Normalises(Gate):
    """Counts in three ways, and keeps a mean, as a norm for batches does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.seen = []

    def factor(self, x):
        self.seen.append(len(self.seen))
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


class WritesItsInput(Gate):
    def factor(self, x):
        return x.mul_(2)


@pytest.mark.parametrize(
    "kind", [Selects, Branches, Draws, DrawsOutside, Normalises, WritesItsInput]
)
def test_a_module_that_a_second_run_would_take_another_way_runs_once(kind):
    model, x = gated(kind()), torch.randn(128, 64)
    model[1].mean = getattr(model[1], "mean", float(model[0](x).detach().square().mean()))
    plain = copy.deepcopy(model)
    with compress_activations(model, bits=8) as compressed:
        for rows in (128, 128, 8):
            found, expected = step(model, x[:rows]), step(plain, x[:rows])
            if kind is not DrawsOutside:
                assert_close(found, expected)
        assert compressed.rerun == []
    if kind is Normalises:
        assert len(model[1].seen) == 3
        assert torch.equal(model[1].mean, plain[1].mean)


class Scaled(Gate):
    """Has a mode, an attribute, a weight and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.calls = torch.nn.Parameter(torch.ones(64)), 1.0, 0

    def factor(self, x):
        self.calls += 1
        return functional.dropout(x, 0.2, self.training) * self.weight * self.scale


def test_a_module_runs_again_as_it_was():
    model, x = gated(Scaled()), torch.randn(128, 64)
    plain = copy.deepcopy(model)

    def change(model):
        model.eval()
        model[1].scale = 5.0

    def gradients(model):
        model.train()
        model[1].scale = 1.0
        return step(model, x, lambda: change(model))

    def by_others(model):
        others = {name: 1.5 * it for name, it in model.named_parameters()}
        torch.manual_seed(1)
        loss = torch.func.functional_call(model, others, (x,)).square().mean()
        return torch.autograd.grad(loss, list(others.values()))

    expected = gradients(plain), by_others(plain)
    with compress_activations(model, bits=8) as compressed:
        gradients(model)
        assert compressed.rerun == ["1"]
        assert_close(gradients(model), expected[0])
        assert_close(by_others(model), expected[1])
        assert model[1].calls == 3
        assert (model[1].training, model[1].scale) == (False, 5.0)
        loss = model(x).sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(ReplayError, match="parameter or buffer of Scaled"):
            loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_module_that_runs_again(reentrant):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.inside = torch.nn.Linear(64, 64), gated(Gate()), False

        def forward(self, x):
            x = self.first(x)
            return (
                checkpoint(self.inner, x, use_reentrant=reentrant) if self.inside else self.inner(x)
            )

    model, x = Block(), torch.randn(128, 64)
    plain = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=8) as compressed:
        step(model, x)
        assert compressed.rerun == ["inner.1"]
        model.inside = True
        assert_close(step(model, x), plain)


def test_a_module_that_runs_again_in_double_precision():
    model, x = gated(Gate()), torch.randn(128, 64)
    with compress_activations(model, bits=8) as compressed:
        step(model, x)
        assert compressed.rerun == ["1"]
        model.double()
        expected = step(copy.deepcopy(model), x.double())
        for a, b in zip(step(model, x.double()), expected, strict=True):
            assert torch.equal(a, b)


class Thrice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.gate = torch.nn.Linear(64, 64), Gate()

    def forward(self, x):
        for _ in range(3):
            x = self.gate(self.linear(x))
        return x


def test_bytes_of_modules_that_run_again():
    model, x = Thrice(), torch.randn(512, 64)
    with compress_activations(model, bits=8) as compressed:
        step(model, x)
        plain = compressed.saved.plain_bytes
        step(model, x[:256])
        assert compressed.saved.plain_bytes == plain // 2
        step(model, x)
        assert compressed.saved.plain_bytes == plain
        # Each call of the module has a row of its own.
        assert compressed.controller.total_bytes == compressed.saved.compressed_bytes
    # Of 8 bits for the module's inputs, two numbers for each row of them, and 1 to 8 bits for the
    # linear layer's.
    for budget in (150_000, 125_000):
        with compress_activations(model, budget=budget) as compressed:
            step(model, x)
            for _ in range(2):
                step(model, x)
                assert 0.6 * budget < compressed.saved.compressed_bytes <= budget
    with compress_activations(Gate(), bits=8) as compressed:
        for _ in range(2):
            compressed.model(x.requires_grad_()).sum().backward()
        assert compressed.rerun == [""]
        assert compressed.controller.total_bytes == compressed.saved.compressed_bytes == 0


def test_who_wraps_a_module_later_is_left_alone():
    model, x = gated(Gate()), torch.randn(128, 64)
    compressed = compress_activations(model, bits=8)
    step(model, x)
    ours = model[1].forward
    model[1].forward = theirs = lambda x: 2 * ours(x)
    compressed.close()
    assert model[1].forward is theirs
    assert torch.equal(model[1](x), 2 * Gate()(x))


def test_copies_of_a_model_with_modules_that_run_again():
    model, x = gated(Gate()), torch.randn(128, 64)
    with compress_activations(model, bits=8, every=1) as compressed:
        for _ in range(2):
            step(model, x)
            torch.save(model, io.BytesIO())
        expected = step(model, x)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(p._backward_hooks for p in copied.parameters())
            assert_close(step(copied, x), expected)
            assert copied[1].forward is not model[1].forward
        assert compressed.current is None
        assert list(model.state_dict()) == list(copied.state_dict())


class Attention(nn.Module):
    """Queries, keys and values are parts of one memory; dropout leaves no fused kernel."""

    def __init__(self, rate=0.2):
        super().__init__()
        self.parts, self.rate = nn.Linear(32, 96), rate

    def forward(self, x):
        q, k, v = self.parts(x).view(4, 64, 2, 3, 16).permute(3, 0, 2, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, key=k, value=v, dropout_p=self.rate)
        return torch.relu_(y * 1.0)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_attention_without_a_fused_kernel_runs_again_with_the_same_dropout(rate):
    torch.manual_seed(0)
    model, x = Attention(rate), torch.randn(4, 64, 32, requires_grad=True)

    def twice():
        torch.manual_seed(3)
        loss = model(x).square().sum()
        if rate:  # torch's fused kernel has no second derivative
            loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return torch.autograd.grad(loss, model.parts.weight)[0]

    expected = twice()
    with compress_activations(model, bits=8) as compressed:
        for _ in range(3):
            # 8 bits of a range of some six deviations are 0.7 % of one, in both passes.
            assert float((twice() - expected).norm() / expected.norm()) < 0.02
        assert not rate or compressed.rerun == ["model/scaled_dot_product_attention"]
        assert compressed.saved.ratio > (12 if rate else 3)
        again = compressed.controller.total_bytes
        assert abs(again / compressed.saved.compressed_bytes - 1) < 0.01


def test_parts_of_a_memory_are_packed_as_copies_without_gaps():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 192), nn.Linear(64, 8)

        def forward(self, x):
            return sum(self.down(part) for part in self.up(x).chunk(3, -1))

    torch.manual_seed(0)
    model, x = Parts(), torch.randn(128, 64)
    plain = torch.autograd.grad(model(x).square().sum(), model.down.weight)[0]
    with compress_activations(model, bits=8) as compressed:
        own = torch.autograd.grad(model(x).square().sum(), model.down.weight)[0]
    assert float((own - plain).norm() / plain.norm()) < 0.02
    assert compressed.saved.ratio > 3.5


def test_statistics_of_wide_norms_are_exact():
    """As many as weights, and more than the fewest elements that are packed."""
    model, x = nn.Sequential(nn.Conv2d(3, 2048, 1), nn.BatchNorm2d(2048)), torch.randn(2, 3, 4, 4)
    with compress_activations(model, bits=8) as compressed:
        model(x).sum().backward()
    keys = [row.key for row in compressed.controller.rows()]
    assert [key for key in keys if "batch_norm" in key] == ["1/batch_norm/0"]


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x):
        return torch.sigmoid(x + self.inner(x))


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_faster_per_byte_runs_again_or_is_packed(fast, monkeypatch):
    """Modules of several layers, too; the innermost that pay give way to what is around them."""
    clock = count()
    monkeypatch.setattr(compress, "now", lambda device: 0.0 if fast else float(next(clock)))
    model, x = nn.Sequential(*(Perceptron() for _ in range(12))), torch.randn(512, 32)
    plain = step(copy.deepcopy(model), x)
    with compress_activations(model, bits=8) as compressed:
        for _ in range(3):
            assert_close(step(model, x), plain)
        assert compressed.rerun == ([str(place) for place in range(12)] if fast else [])
        ways = {way: (tensors, size) for way, tensors, size in compressed.saved.ways}
        assert sum(size for _, size in ways.values()) == compressed.saved.plain_bytes
        assert ways["modules run again"][0] == (12 if fast else 0)
        assert compressed.controller.total_bytes == compressed.saved.compressed_bytes
        text = compressed.report()
        assert ("12 modules run again" in text) == fast
        assert "s for each GiB" in text


class GeluOfSevenOps(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * torch.pow(x, 3))))


def test_a_choice_is_the_same_in_each_run_where_that_is_asked_for(monkeypatch):
    """Whatever a clock says: a restart, or another machine, rounds as before."""
    monkeypatch.setattr(settings, "deterministic", True)
    layers = [nn.Linear(32, 128), GeluOfSevenOps(), nn.Linear(128, 32), nn.GELU()]
    model, x = nn.Sequential(nn.Sequential(*layers), nn.Linear(32, 32)), torch.randn(512, 32)
    steps = []
    for often in (0.0, 1.0, -1.0):
        clock = count(0.0, often)
        for module in (compress, saving):
            monkeypatch.setattr(module, "now", lambda device, clock=clock: float(next(clock)))
        own = copy.deepcopy(model)
        with compress_activations(own, bits=4, seed=3) as compressed:
            steps.append([step(own, x) for _ in range(2)])
            assert compressed.rerun == ["0.1"]
    for other in steps[1:]:
        for own, first in zip(other, steps[0], strict=True):
            assert all(map(torch.equal, own, first))


def test_a_large_budget_leaves_tensors_as_they_are(modules_take_long):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(512, 64)
    expected, plain = step(copy.deepcopy(model), x), 7 * 512 * 64 * 4
    held = []
    for budget in (plain, plain // 2, plain // 8):
        with compress_activations(model, budget=budget, every=1) as compressed:
            for _ in range(3):
                found = step(model, x)
            ways = {way: tensors for way, tensors, _ in compressed.saved.ways}
            held.append(ways["left as they are"])
            assert 0.6 * budget < compressed.saved.compressed_bytes <= budget
            if budget == plain:
                assert all(map(torch.equal, found, expected))
                assert compressed.report().count(" exact ") == 7
    assert held[0] == 7 > held[1] > held[2] == 0


class Whole(nn.Sequential):
    """Layers that do not take some images at a time together, as this forward might do more."""

    def forward(self, x):
        return super().forward(x)


def test_a_convolution_takes_images_one_at_a_time():
    torch.manual_seed(0)
    model = Whole(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 6, 3, 2, padding=(1, 0), dilation=2, groups=2, bias=False),
        nn.Conv2d(6, 4, 1),
    )
    x = torch.randn(10, 3, 200, 200, requires_grad=True)

    def twice():
        loss = model(x).square().sum()
        return torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)

    def thrice(first):
        return torch.autograd.grad(sum(it.square().sum() for it in first), x)[0]

    first = twice()
    second = thrice(first)
    with compress_activations(model, bits=8):
        most = []
        for _ in range(2):
            model.zero_grad()
            loss = model(x).square().sum()
            with StorageTracker([x, *model.parameters()]) as tracker:
                loss.backward()
            most.append(tracker.peak_bytes - tracker.start_bytes)
            for ours, theirs in zip((it.grad for it in model.parameters()), first[1:], strict=True):
                assert (ours - theirs).norm() < 0.02 * theirs.norm()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        found = twice()
        assert (found[0] - first[0]).norm() < 0.02 * first[0].norm()
        assert (thrice(found) - second).norm() < 0.03 * second.norm()
    # Whole, the unpacked input of the second convolution would be there beside its gradient.
    assert most[1] < 1.8 * 10 * 8 * 200 * 200 * 4


def test_what_was_packed_goes_with_the_op_that_reads_it():
    """Not with the graph, which the loss holds, and not when gc comes by."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    gc.collect()
    gc.disable()
    try:
        with compress_activations(model, bits=8) as compressed:
            loss = model(torch.randn(256, 64)).sum()
            kept = [it for it in gc.get_objects() if isinstance(it, (Mask, OnHost))]
            assert sum(it.nbytes for it in kept) == compressed.saved.compressed_bytes
            kept = list(map(weakref.ref, kept))
            loss.backward()
            assert [it() for it in kept] == [None] * len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("settings", [{"bits": 4}, {"budget": 1000}, {"error": 0.1}])
def test_a_model_that_saves_nothing(settings):
    model, x = nn.Flatten(), torch.randn(64, 8, 8, requires_grad=True)
    with compress_activations(model, every=1, **settings) as compressed:
        for _ in range(3):
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
            assert torch.equal(gradient, torch.ones_like(x))
        assert (compressed.saved.plain_bytes, compressed.saved.compressed_bytes) == (0, 0)
        assert compressed.rerun == []
        assert compressed.report().startswith("activations 0")
