"""Bytes by category before anything is allocated, and the one peak that percent are of."""

import importlib
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from small_models import Everything, images, mlp, module_of
from steps import grads, optimizer_tensors
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sn_memory import BudgetError, Graph, plan_graph
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import StorageTracker, estimate, plan, trace, verify
from sn_memory.torch.model.step import restore_step, run_step
from sn_memory.torch.trace.fake import FakeMode

SAMPLE = torch.zeros(4, 32)


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
    assert "parameters" in str(found)
    assert "KiB" in str(found)


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


def test_a_batch_that_cannot_be_known():
    model = module_of(lambda self, x, y: self.linear(x) @ y, linear=nn.Linear(3, 3))
    found = estimate(model, (torch.zeros(4, 3), torch.zeros(3, 7)))
    assert found.batch is None
    with pytest.raises(ValueError, match="differ in their first dimension"):
        found.largest_batch("1GB")


# Numbers of Python that an op gets are tensors meanwhile, of 4 or 8 bytes each.
NUMBERS_BYTES = 64


def as_measured(model, *sample):
    """Whether the step's estimate is what a step takes, but for numbers; and the estimate."""
    arguments = sample, {}
    with restore_step(model, arguments):
        measured = run_step(model, model, arguments, kernels=True).peak_bytes
    found = estimate(model, sample if len(sample) > 1 else sample[0])
    return 0 <= measured - found.step_bytes <= NUMBERS_BYTES, found


def test_the_step_is_what_is_measured():
    model, sample = Everything(), images()
    found = estimate(model, sample)
    with StorageTracker([*model.parameters(), *model.buffers(), sample, model.scale]) as tracker:
        out = model(sample)
    output_gradient = torch.ones_like(out)
    tracker.meet(output_gradient)
    with tracker:
        out.backward(output_gradient)
    # The constant torch.tensor([2.0]) is a new one in each plain step; traced, it stays.
    assert abs(found.step_bytes - tracker.peak_bytes) <= 4


@pytest.mark.parametrize("device", [None, "h100"])
def test_a_forward_that_sets_attributes_is_estimated(device):
    """Heads of transformers note the kind of problem in their configuration, in the first step."""

    def forward(self, x):
        self.kind = "regression"
        return self.inner(x)

    model = module_of(forward, inner=mlp(3))
    found = estimate(model, SAMPLE, device=device)
    assert found.peak_bytes == estimate(model.inner, SAMPLE, device=device).peak_bytes
    assert not hasattr(model, "kind")


def test_what_variables_hold_counts():
    """They hold what nobody needs any more, while it is computed what is largest."""

    def forward(self, x):
        wide = self.linear(x).repeat(1, 8)
        kept = {"scaled": wide * 2, "again": wide.neg()}
        x = (kept["scaled"] + kept["again"]).sum(1, keepdim=True) + self.linear(x).repeat(1, 12)
        return x.sum(1)

    is_same, found = as_measured(module_of(forward, linear=nn.Linear(32, 32)), torch.randn(16, 32))
    assert is_same
    # As large a batch as fits is computed by the same count.
    assert found.largest_batch(found.step_bytes) == 16


LAYERS = {
    "GCNConv": {"add_self_loops": False},
    "GATConv": {"add_self_loops": False, "heads": 4},
    "GATv2Conv": {"add_self_loops": False, "heads": 4},
    "SAGEConv": {"aggr": "max"},
    "TransformerConv": {"heads": 4},
    "GINConv": {},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_messages_on_a_graph(kind):
    geometric = pytest.importorskip("torch_geometric.nn")
    settings = LAYERS[kind]
    if kind == "GINConv":
        parts = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(2)]
        layers = [geometric.GINConv(it) for it in parts]
    else:
        width = 32 // settings.get("heads", 1)
        layers = [getattr(geometric, kind)(32, width, **settings) for _ in range(3)]
    model = geometric.Sequential("x, edges", [(it, "x, edges -> x") for it in layers])
    assert as_measured(model, torch.randn(100, 32), torch.randint(0, 100, (2, 700)))[0]


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
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "log softmax": lambda x: x.log_softmax(1),
    "glu": lambda x: functional.glu(x, -1),
    "roll": lambda x: x.roll(1, 1),
    "mse": lambda x: functional.mse_loss(x, x.detach() * 2, reduction="none"),
    "huber": lambda x: functional.huber_loss(x, x.detach() * 2, reduction="none"),
    "mse, mean": lambda x: functional.mse_loss(x, x.detach() * 2),
    "huber, mean": lambda x: functional.huber_loss(x, x.detach() * 2),
    "smooth l1": lambda x: functional.smooth_l1_loss(x, x.detach() * 2, reduction="none"),
    "smooth l1, mean": lambda x: functional.smooth_l1_loss(x, x.detach() * 2),
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
            tensors = (it for it in tree_leaves(result) if isinstance(it, torch.Tensor))
            self.seen += [(str(func), it.shape, it.stride()) for it in tensors if it.dim() > 1]
        return result


@pytest.mark.parametrize("op", OTHERWISE)
def test_results_lie_as_kernels_lay_them(op):
    for lies, draw in INPUTS.items():
        seen = []
        for mode in (nullcontext(), FakeMode()):
            with mode, _Strides() as strides:
                x = draw().requires_grad_()
                out = OTHERWISE[op](x)
                out.backward(torch.ones(out.shape))
            # A decomposition may look at a tensor more often.
            seen.append([it for it in strides.seen if ".detach" not in it[0]])
        assert seen[0] == seen[1], lies


# Optimizers


def adafactor(**settings):
    return lambda weights: pytest.importorskip("transformers.optimization").Adafactor(
        weights, **settings
    )


# Some look at values in their step, which has none here.
KINDS = {
    "SGD": lambda it: torch.optim.SGD(it, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "torch's Adafactor": torch.optim.Adafactor,
    "Adafactor": adafactor(),
    "Adafactor with a rate": adafactor(relative_step=False, lr=0.1, beta1=0.9),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


def held_by(optimizer):
    return sum(it.nbytes for it in optimizer_tensors(optimizer))


def stepped(model, optimizer, sample=SAMPLE):
    model(sample).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_state_of_optimizers(kind):
    model = mlp(2)
    optimizer = kind(model.parameters())
    found = estimate(model, SAMPLE, optimizer=optimizer)
    assert grads(model) == [None] * 4
    assert found.optimizer_bytes == held_by(stepped(model, kind(model.parameters()))) > 0


def test_a_plan_counts_it_too():
    model = mlp(4)
    optimizer = torch.optim.Adafactor(model.parameters())
    with_it = plan(model, SAMPLE, "100%", profile=False, optimizer=optimizer).sn_memory.plan
    without = plan(model, SAMPLE, "100%", profile=False).sn_memory.plan
    found = estimate(model, SAMPLE, optimizer=optimizer)
    assert with_it.peak_bytes == without.peak_bytes + found.optimizer_bytes
    assert with_it.baseline_peak_bytes == found.step_bytes
    assert not optimizer.state


class Selects(torch.optim.SGD):
    """Its step looks for places, and how many there are depends on values."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight[weight.grad > 0].clone()
        super().step()


class Greedy(torch.optim.SGD):
    """Takes what no twin has."""

    def __init__(self, params, model):
        super().__init__(params, lr=0.1, momentum=0.9)


class Endless(torch.optim.SGD):
    """Goes on until a value says so."""

    def step(self):
        while self.param_groups[0]["params"][0].abs().max().item() < 1e9:
            pass


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Selects, "without values"),
        (torch.optim.LBFGS, "without values"),
        (lambda weights: Greedy(weights, nn.Identity()), "without values"),
        (Endless, "again and again"),
    ],
)
def test_a_step_that_cannot_run_without_values_is_said_with_its_reason(kind, words):
    model = mlp(2)
    with pytest.warns(PlanWarning, match=words) as caught:
        found = estimate(model, SAMPLE, optimizer=kind(model.parameters()))
    assert len(caught) == 1
    assert found.optimizer_bytes == 0
    assert found.step_bytes == estimate(model, SAMPLE).step_bytes


def test_then_the_state_it_has_counts():
    model = mlp(2)
    optimizer = stepped(model, Selects(model.parameters()))
    with pytest.warns(PlanWarning, match="DynamicOutputShape"):
        found = estimate(model, SAMPLE, optimizer=optimizer)
    assert found.optimizer_bytes == held_by(optimizer) == found.parameters_bytes


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_numbers_and_the_batch_count_in_the_optimizers_step(kind, foreach):
    """A kernel of the CPU takes two small tensors for a Python number."""
    # Its input is larger than its weights, as features of video frames are.
    model = module_of(lambda self, x: self.inner(x.mean(1)).square().mean(), inner=mlp(2, 256))
    x = torch.randn(16, 64, 256)
    optimizer = kind(model.parameters(), foreach=foreach)
    found = estimate(model, x, optimizer=optimizer)
    stepped(model, optimizer, x)
    held = [*model.parameters(), *grads(model), x, *optimizer_tensors(optimizer)]
    top = now = sum(it.nbytes for it in held)
    with torch.profiler.profile(profile_memory=True) as watched:
        optimizer.step()
    events = [it for it in watched.profiler.kineto_results.events() if it.name() == "[memory]"]
    for event in sorted(events, key=lambda it: it.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    assert found.update_bytes == top
    # A smaller batch is less to hold.
    one = found._step_of(1)
    assert one < found.update_bytes - 15 * x.nbytes // 16 + 10_000
    assert found.largest_batch(one) == 1


# Percent


X = torch.randn(256, 32)


def test_percent_are_of_what_estimate_and_verify_tell():
    def forward(self, x):
        """Has names for what it no longer needs, as Python code has."""
        hidden = self.first(x)
        large = torch.cat([hidden.detach()] * 4, 1)
        scale = large.mean()
        for _ in range(8):
            hidden = torch.tanh(self.rest(hidden)) * scale
        return hidden.square().mean()

    model = module_of(forward, first=nn.Linear(32, 32), rest=nn.Linear(32, 32))
    planned = plan(model, X, "95%", profile=False)
    found = planned.sn_memory.plan
    traced = trace(model, X, profile=False, unplanned=False).graph
    assert found.baseline_peak_bytes > plan_graph(traced, "100%").peak_bytes
    whole = estimate(model, X).peak_bytes
    assert planned.sn_memory.budget_bytes == int(0.95 * whole)
    assert found.baseline_peak_bytes == whole == verify(planned, X).unplanned_peak_bytes
    # Those of an error are of the same.
    with pytest.raises(BudgetError) as error:
        plan(model, X, "20%", profile=False)
    assert error.value.budget_bytes == int(0.2 * whole)
    assert error.value.percent == -(-100 * error.value.peak_bytes // whole)
    planned = plan(model, X, f"{error.value.percent}%", profile=False)
    assert planned.sn_memory.plan.peak_bytes >= error.value.peak_bytes
    # And those of a graph that was in a file.
    graph = trace(model, X, profile=False).graph
    read = Graph.from_json(graph.to_json())
    assert read == graph
    assert read.unplanned_peak_bytes == whole
    assert plan_graph(read, "95%").budget_bytes == int(0.95 * whole)


def test_a_fault_in_the_step_without_a_plan_is_not_hidden(monkeypatch):
    """Only what a step without values may be asked for leaves the peak of the traced one."""
    no_value = DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
    fake_step = Mock(side_effect=no_value)
    traces = importlib.import_module("sn_memory.torch.trace.trace")
    monkeypatch.setattr(traces, "fake_step", fake_step)
    assert trace(mlp(1), X, profile=False).graph.unplanned_peak_bytes is None
    fake_step.side_effect = AttributeError("a fault")
    with pytest.raises(AttributeError, match="a fault"):
        trace(mlp(1), X, profile=False)
