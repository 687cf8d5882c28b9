"""A planned model passes for its model; how a call is written makes no other kind of input."""

import copy
import inspect
import re
import typing
import warnings
from operator import attrgetter
from types import MethodType
from unittest.mock import Mock

import pytest
import torch
from small_models import mlp, module_of
from steps import grads, rows, same
from torch import nn

from sn_memory.torch import PlanWarning, TraceError, plan, verify

SETTINGS = {"profile": False, "planner": "sqrt_n", "backend": "graph"}


class Documented(nn.Module):
    """Its forward has everything that a signature can have."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.inner = mlp(3)

    def forward(
        self,
        x: "torch.Tensor",
        bias: "torch.Tensor | None" = None,
        *,
        scale: "float" = 1.0,
        labels: "torch.Tensor | None" = None,
        **others: "typing.Any",
    ) -> "torch.Tensor":
        """Compute rows from rows."""
        out = self.inner(x) * scale * self.gain
        if bias is not None:
            out = out + bias
        for tensor in others.values():
            out = out * 0.5 + tensor
        return out if labels is None else (out - labels).square().mean()


def some(seed=0):
    return rows(16, seed)


def runs_of(planned):
    """Count the planned steps of a model from now on."""
    counted = Mock()
    for step in planned.sn_memory.steps.values():
        step.run = Mock(side_effect=step.run)
        counted.attach_mock(step.run, "run")
    return counted.mock_calls


def test_the_forward_says_of_itself_what_the_class_says():
    model = Documented()
    planned = plan(model, some(), "100%", **SETTINGS)
    for of in (
        *(inspect.signature, inspect.getfullargspec, inspect.getdoc, typing.get_type_hints),
        *map(attrgetter, ("__annotations__", "__name__", "__qualname__", "__module__")),
    ):
        assert of(planned.forward) == of(model.forward)
        assert of(type(planned).forward) == of(Documented.forward)
    assert inspect.getdoc(planned) == inspect.getdoc(model)
    assert inspect.getdoc(planned.forward) == "Compute rows from rows."


class Placed(Documented):
    def forward(self, x, bias, scale, labels=None, mask=None):
        return super().forward(x, bias, scale=scale, labels=labels)


X, B, Y = some(3), some(4), some(5)
BY_PLACE = (some(0), some(1), 2.0, some(2))
BY_NAME = {"bias": some(1), "x": some(0), "labels": some(2), "scale": 2.0}


@pytest.mark.parametrize(
    ("kind", "sample", "args", "kwargs"),
    [
        (Placed, BY_PLACE, (X, B), {"labels": Y, "scale": 2.0}),
        (Placed, BY_PLACE, (), {"scale": 2.0, "labels": Y, "bias": B, "x": X}),
        (Documented, BY_NAME, (X, B), {"labels": Y, "scale": 2.0}),
        (Documented, BY_NAME, (X,), {"labels": Y, "bias": B, "scale": 2.0}),
    ],
)
def test_however_a_call_is_written(kind, sample, args, kwargs):
    model = kind()
    planned = plan(model, sample, "100%", **SETTINGS)
    ran = runs_of(planned)
    assert torch.equal(planned(*args, **kwargs), model(*args, **kwargs))
    assert len(ran) == 1


def test_defaults_spelled_out_are_no_other_kind():
    model = Documented()
    planned = plan(model, some(), "100%", **SETTINGS)
    ran = runs_of(planned)
    planned(some(), None, labels=None)
    planned(x=some(), scale=1.0)
    assert len(ran) == 2
    spelled = plan(model, {"x": some(), "labels": None}, "100%", **SETTINGS)
    ran = runs_of(spelled)
    assert torch.equal(spelled(some(7)), model(some(7)))
    assert len(ran) == 1


def test_what_a_forward_could_tell_apart_is_another_kind():
    model = Documented()
    planned = plan(model, {"x": some(), "scale": 2, "a": some(1), "b": some(2)}, "100%", **SETTINGS)
    # Among `**others` the order is the forward's to see; and 2.0 is not 2.
    for given in (
        {"x": some(), "scale": 2, "b": some(2), "a": some(1)},
        {"x": some(), "scale": 2.0, "a": some(1), "b": some(2)},
        {"x": some(), "scale": 2, "a": some(1), "b": some(2), "c": some(3)},
    ):
        before = len(planned.sn_memory.kinds)
        with warnings.catch_warnings():
            # One more tensor is above a budget that the others take in full.
            warnings.simplefilter("ignore", PlanWarning)
            assert torch.equal(planned(**given), model(**given))
        assert len(planned.sn_memory.kinds) == before + 1


def test_planned_for_one_more_both_are_run():
    planned = plan(Documented(), some(), "100%", **SETTINGS)
    both = plan(planned, torch.randn(3, 32), "100%", **SETTINGS)
    ran = runs_of(both)
    for batch in (3, 16):
        both(torch.randn(batch, 32))
    assert len(ran) == 2


class Noting(nn.Sequential):
    """Trained by its own step, which notes things; some forwards look at them."""

    def __init__(self):
        super().__init__(*mlp(2))
        self.seen, self.losses, self.gain = 0, [], 1.0

    def forward(self, x):
        return super().forward(x) * self.scaled()

    def scaled(self):
        return 2.0

    @property
    def half(self):
        return sum(it.gain for it in [self]) / 2 if self.gain else 0.0

    def step(self, x):
        self.seen += 1
        loss = self(x).sum()
        self.losses.append(loss.item())
        return loss


def gain_of(module):
    return module.gain


class FromInside(Noting):
    def __init__(self):
        super().__init__()
        self.append(module_of(lambda last, x: x * last.around[0].gain, around=[self]))


def test_what_a_training_step_notes_is_no_other_kind():
    planned = plan(Noting(), some(), "100%", **SETTINGS)
    ran = runs_of(planned)
    for _ in range(3):
        planned.step(some()).backward()
        planned.zero_grad()
    planned.gain = 3.0  # no forward of this class asks for it
    planned.step(some())
    assert len(ran) == 4


SCALED = {
    "property": lambda self: self.half,
    "method": lambda self: (lambda: self.gain)(),
    "string": lambda self: getattr(self, "ga" + "in"),
    "function": lambda self: gain_of(self),
}


@pytest.mark.parametrize("how", [*SCALED, "from inside"])
def test_what_a_forward_reads_is_another_kind(how):
    model = type("By", (Noting,), {"scaled": SCALED[how]})() if how in SCALED else FromInside()
    planned = plan(model, some(), "100%", **SETTINGS)
    model.gain = planned.gain = 3.0
    out = planned(some())
    assert re.search(r"modes and numbers.*gain", planned.sn_memory.kinds[-1].unlike)
    assert torch.equal(out, model(some()))


# What changes in the model, the inputs, and the reason.
SHAPES = r"x is float32 of shape \(3, 32\), and was .*\(16, 32\)"
ADDS = "^it has 12 modules, and had 11$"
REASONS = {
    "shape": (None, {"x": torch.zeros(3, 32)}, SHAPES),
    "one more": (None, {"x": some(), "extra": torch.ones(())}, "extra was not given then"),
    "strides": (None, {"x": torch.zeros(32, 16).t()}, r"strides \(1, 16\)"),
    "mode": (lambda it: it.inner[1].eval(), {"x": some()}, r"inner\.1\.training"),
    # Pairs of modules that only stood in one place were said to be of another class.
    "modules": (lambda it: it.inner.insert(0, nn.Tanh()), {"x": some()}, ADDS),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_named(name):
    change, given, says = REASONS[name]
    planned = plan(Documented(), some(), "200%", **SETTINGS)
    if change is not None:
        change(planned)
    planned(**given)
    assert re.search(says, planned.sn_memory.kinds[-1].unlike)


def test_what_cannot_be_compared_raises_the_error_of_the_model():
    planned = plan(Documented(), some(), "100%", **SETTINGS)
    with pytest.raises(TypeError):
        planned(some(), labels={1})


def test_a_forward_that_others_put_on_the_instance():
    """As accelerate does for mixed precision: a bound method around ours."""
    model = Documented()
    planned = plan(model, some(), "100%", **SETTINGS)
    around = Mock(side_effect=planned.forward.__func__)
    planned.forward = MethodType(around, planned)
    ran = runs_of(planned)
    assert torch.equal(planned(some()), model(some()))
    assert len(ran) == around.call_count == 1
    # The plain one that is compared with must not run the plan, nor a copy want one.
    assert verify(planned, some()).equal
    assert torch.equal(copy.deepcopy(planned)(some()), model(some()))


def test_planned_models_are_stacked_as_an_ensemble():
    """torch asks for models of one class; once each planned model was the only one of its own."""
    models, x = [mlp(3) for _ in range(2)], some()
    planned = [plan(model, x, "100%", **SETTINGS) for model in models]
    state, same_state = map(torch.func.stack_module_state, (planned, models))
    base = copy.deepcopy(planned[0])

    def run(state):
        return torch.func.functional_call(base, state, x)

    outputs = torch.vmap(run)(state)
    assert torch.equal(outputs, torch.vmap(run)(same_state))
    torch.testing.assert_close(outputs, torch.stack([model(x) for model in models]))


def around(inner, breaks=lambda: None):
    """Calls a planned model among its own layers, and something before and after it."""

    def forward(self, x):
        x = self.first(x)
        breaks()
        x = self.inner(x)
        breaks()
        return self.last(x)

    return module_of(forward, first=nn.Linear(32, 32), inner=inner, last=nn.Linear(32, 32))


EAGER = {"backend": "eager"}


def by_method(planned):
    planned.compile(**EAGER)
    return planned


BREAK = torch._dynamo.graph_break
COMPILED = {
    "module": lambda planned: torch.compile(planned, **EAGER),
    "method": by_method,
    "function": lambda planned: torch.compile(lambda x: planned(x).sum(), **EAGER),
    "a larger module": lambda planned: torch.compile(around(planned), **EAGER),
    "graph breaks": lambda planned: torch.compile(around(planned, BREAK), **EAGER),
    "one graph": lambda planned: torch.compile(around(planned), fullgraph=True, **EAGER),
    "autograd too": lambda planned: torch.compile(around(planned), backend="aot_eager"),
    "exported": lambda planned: torch.export.export(planned, (some(),)).module(),
}


@pytest.mark.parametrize(
    ("way", "backend", "suppressed"),
    [
        *((it, "graph", False) for it in COMPILED),
        *(("module", "modules", False), ("method", "compile", False)),
        ("a larger module", "graph", True),
    ],
)
def test_torch_compile_of_what_calls_a_planned_model(way, backend, suppressed):
    torch._dynamo.reset()
    planned = plan(mlp(2), some(), "100%", backend=backend, profile=False)
    # With one graph or none torch raises its own error, and ours is in it.
    settings = torch._dynamo.config.patch(suppress_errors=suppressed)
    error = RuntimeError if way in ("one graph", "exported", "autograd too") else TraceError
    instead = "Export the model without" if way == "exported" else "Plan with backend='compile'"
    with settings, pytest.raises(error, match=instead):
        COMPILED[way](planned)(some())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["graph", "modules"])
def test_blocks_compiled_inside_a_planned_model(backend):
    """By ops, the recorded ones run; by modules, those run again are compiled as well."""
    torch._dynamo.reset()
    model, many = mlp(4), torch.randn(512, 32)
    planned = plan(copy.deepcopy(model), many, "80%", **{**SETTINGS, "backend": backend})
    assert planned.sn_memory.plan.decided("recompute")
    for block in planned:
        block.compile(backend="eager")
    mine, theirs = planned(many), model(many)
    mine.sum().backward()
    theirs.sum().backward()
    assert same([mine, *grads(planned)], [theirs, *grads(model)])


# torch.compile asks what its inputs are, and torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_planned_model_beside_compiled_code():
    torch._dynamo.reset()
    planned = plan(mlp(2), some(), "100%", **SETTINGS)
    ran = runs_of(planned)
    left_out = torch.compiler.disable(planned)
    compiled = torch.compile(lambda x: left_out(x * 2), backend="eager")
    compiled(some()).sum().backward()
    planned.zero_grad()
    torch.compile(lambda x: x * 2, backend="eager")(planned(some()))
    assert len(ran) == 2
