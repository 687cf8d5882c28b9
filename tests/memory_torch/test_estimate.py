"""Bytes by category before anything is allocated."""

import importlib
from contextlib import nullcontext

import pytest
import torch
from small_models import Everything, images, mlp
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sn_memory import BudgetError
from sn_memory.torch import StorageTracker, estimate
from sn_memory.torch.model.step import restore_step, run_step
from sn_memory.torch.trace.fake import FakeMode


def test_categories_of_a_chain():
    found = estimate(mlp(3, 16), torch.zeros(10, 16), optimizer=torch.optim.Adam)
    weights = 3 * (16 * 16 + 16) * 4
    assert found.parameters_bytes == found.gradients_bytes == weights
    # Two moments for each weight, one step count for each of the six parameters.
    assert found.optimizer_bytes == 2 * weights + 6 * 4
    assert found.inputs_bytes == 10 * 16 * 4
    # GELU keeps its input and the next layer keeps that of GELU; the last is the output.
    assert found.activations_bytes == 3 * 2 * 10 * 16 * 4
    assert found.batch == 10
    assert found.fits(found.peak_bytes)
    assert not found.fits(found.peak_bytes - 1)


def test_the_step_is_what_is_measured():
    model, sample = Everything(), images()
    found = estimate(model, sample)
    known = [*model.parameters(), *model.buffers(), sample, model.scale]
    with StorageTracker(known) as tracker:
        out = model(sample)
    output_gradient = torch.ones_like(out)
    tracker.meet(output_gradient)
    with tracker:
        out.backward(output_gradient)
    # The constant torch.tensor([2.0]) is made anew in each plain step; traced, it stays.
    assert abs(found.step_bytes - tracker.peak_bytes) <= 4


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_state_of_optimizers(kind):
    model = mlp(2)
    found = estimate(model, torch.zeros(4, 32), optimizer=kind(model.parameters(), lr=0.1))
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.zeros(4, 32)).sum().backward()
    optimizer.step()
    held = [it for state in optimizer.state.values() for it in state.values()]
    assert found.optimizer_bytes == sum(it.nbytes for it in held if isinstance(it, torch.Tensor))


def test_the_users_optimizer_is_not_touched():
    model = mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = estimate(model, torch.zeros(4, 32), optimizer=optimizer)
    assert found.optimizer_bytes == found.parameters_bytes
    assert not optimizer.state
    assert all(it.grad is None for it in model.parameters())


@pytest.mark.parametrize("room", [60_000, 123_456])
def test_largest_batch_is_the_largest(room):
    model = mlp(2)
    batch = estimate(model, torch.zeros(2, 32)).largest_batch(room)
    assert estimate(model, torch.zeros(batch, 32)).fits(room)
    assert not estimate(model, torch.zeros(batch + 1, 32)).fits(room)


def test_no_batch_fits():
    with pytest.raises(BudgetError, match="a batch of 1 needs") as caught:
        estimate(mlp(1), torch.zeros(2, 32)).largest_batch(1000)
    assert caught.value.peak_bytes > 1000


def test_a_batch_that_cannot_be_told():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, y):
            return self.linear(x) @ y

    found = estimate(Two(), (torch.zeros(4, 3), torch.zeros(3, 7)))
    assert found.batch is None
    with pytest.raises(ValueError, match="differ in their first dimension"):
        found.largest_batch("1GB")


def test_it_reads_like_a_table():
    text = str(estimate(mlp(1), torch.zeros(2, 32)))
    assert "parameters" in text
    assert "KiB" in text


# Numbers of Python that an op is given are tensors meanwhile, of 4 or 8 bytes each.
NUMBERS_BYTES = 64


def measured(model, arguments):
    with restore_step(model, arguments):
        return run_step(model, model, arguments, kernels=True).peak_bytes


class Holds(nn.Module):
    """Its variables hold what nobody needs any more, while it makes what is largest."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        wide = self.linear(x).repeat(1, 8)
        kept = {"scaled": wide * 2, "again": wide.neg()}
        x = (kept["scaled"] + kept["again"]).sum(1, keepdim=True) + self.linear(x).repeat(1, 12)
        return x.sum(1)


def test_what_variables_hold_counts():
    model, sample = Holds(), torch.randn(16, 32)
    found = estimate(model, sample)
    assert 0 <= measured(model, ((sample,), {})) - found.step_bytes <= NUMBERS_BYTES
    # As large a batch as fits is told by the same count.
    assert found.largest_batch(found.step_bytes) == 16


LAYERS = {
    "GCNConv": {"add_self_loops": False},
    "GATConv": {"add_self_loops": False, "heads": 4},
    "GATv2Conv": {"add_self_loops": False, "heads": 4},
    "SAGEConv": {"aggr": "max"},
    "TransformerConv": {"heads": 4},
}


class Graph(nn.Module):
    """Three layers of torch_geometric."""

    def __init__(self, kind, **settings):
        super().__init__()
        layer = getattr(importlib.import_module("torch_geometric.nn"), kind)
        width = 32 // settings.get("heads", 1)
        self.layers = nn.ModuleList(layer(32, width, **settings) for _ in range(3))

    def forward(self, x, edges):
        for layer in self.layers:
            x = torch.relu(layer(x, edges))
        return x


@pytest.mark.parametrize("kind", LAYERS)
def test_messages_on_a_graph(kind):
    pytest.importorskip("torch_geometric")
    model = Graph(kind, **LAYERS[kind])
    sample = torch.randn(100, 32), torch.randint(0, 100, (2, 700))
    assert 0 <= measured(model, (sample, {})) - estimate(model, sample).step_bytes <= NUMBERS_BYTES


def test_messages_through_a_layer_that_is_given():
    geometric = pytest.importorskip("torch_geometric.nn")
    parts = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(2)]
    layers = [(geometric.GINConv(it), "x, edges -> x") for it in parts]
    model = geometric.Sequential("x, edges", layers)
    sample = torch.randn(100, 32), torch.randint(0, 100, (2, 700))
    assert 0 <= measured(model, (sample, {})) - estimate(model, sample).step_bytes <= NUMBERS_BYTES


# Where torch's own rules lay results out otherwise than kernels of the CPU do.
OTHERWISE = {
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "elu": functional.elu,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "softplus": functional.softplus,
    "logsigmoid": functional.logsigmoid,
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "glu": lambda x: functional.glu(x, -1),
    "roll": lambda x: x.roll(1, 1),
    "mse": lambda x: functional.mse_loss(x, x.detach() * 2, reduction="none"),
    "huber": lambda x: functional.huber_loss(x, x.detach() * 2, reduction="none"),
}
INPUTS = {
    "rows": lambda: torch.randn(6, 8).t(),
    "tokens": lambda: torch.randn(4, 6, 8).transpose(1, 2),
    "turned": lambda: torch.randn(4, 6, 8).permute(2, 0, 1),
    "by channels": lambda: torch.randn(4, 6, 6, 8).permute(0, 3, 1, 2),
    "heads": lambda: torch.randn(4, 6, 8, 6).transpose(1, 2),
}


class _Strides(TorchDispatchMode):
    """Notes how results lie."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            made = (it for it in tree_leaves(result) if isinstance(it, torch.Tensor))
            self.seen += [(str(func), it.shape, it.stride()) for it in made if it.dim() > 1]
        return result


@pytest.mark.parametrize("lies", INPUTS)
@pytest.mark.parametrize("op", OTHERWISE)
def test_results_lie_as_kernels_lay_them(op, lies):
    seen = []
    for mode in (nullcontext(), FakeMode()):
        with mode, _Strides() as strides:
            x = INPUTS[lies]().requires_grad_()
            out = OTHERWISE[op](x)
            out.backward(torch.ones(out.shape))
        # A decomposition may look at a tensor more often.
        seen.append([it for it in strides.seen if ".detach" not in it[0]])
    assert seen[0] == seen[1]


class Pools(nn.Module):
    """Its input is larger than its weights, as features of video frames are."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(2, 256)

    def forward(self, frames):
        return self.inner(frames.mean(1)).square().mean()


def test_the_batch_counts_while_the_optimizer_updates():
    model, x = Pools(), torch.randn(16, 64, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    found = estimate(model, x, optimizer=optimizer)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [it for held in optimizer.state.values() for it in held.values()]
    model(x).backward()
    held = [*model.parameters(), *(it.grad for it in model.parameters()), x, *state]
    with StorageTracker(held) as tracker:
        optimizer.step()
    assert tracker.peak_bytes <= found.update_bytes <= 1.01 * tracker.peak_bytes
    # A smaller batch is less to hold.
    one = found._step_of(1)
    assert one < found.update_bytes - 15 * x.nbytes // 16 + 10_000
    assert found.largest_batch(one) == 1


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_numbers_as_tensors_count_in_the_optimizers_step(kind, foreach):
    # A kernel of the CPU makes two small tensors of a Python number.
    model, x = Pools(), torch.randn(4, 2, 256)
    optimizer = kind(model.parameters(), foreach=foreach)
    found = estimate(model, x, optimizer=optimizer)
    model(x).backward()
    optimizer.step()
    state = [it for held in optimizer.state.values() for it in held.values()]
    held = [*model.parameters(), *(it.grad for it in model.parameters()), x, *state]
    top = now = sum(it.nbytes for it in held)
    with torch.profiler.profile(profile_memory=True) as watched:
        optimizer.step()
    events = [it for it in watched.profiler.kineto_results.events() if it.name() == "[memory]"]
    for event in sorted(events, key=lambda it: it.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    assert found.update_bytes == top
