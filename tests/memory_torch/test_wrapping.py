"""A planned model passes for its model; how a call is written makes no other kind of input."""

import copy
import inspect
import re
import typing
import warnings

import pytest
import torch
from small_models import mlp
from steps import grads, same
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


def rows(seed=0):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def runs_of(planned):
    """Count the planned steps of a model from now on."""
    ran = []
    for step in planned.sn_memory.steps.values():

        def run(*given, own=step.run):
            ran.append(1)
            return own(*given)

        step.run = run
    return ran


def test_the_forward_says_of_itself_what_the_class_says():
    model = Documented()
    planned = plan(model, rows(), "100%", **SETTINGS)
    for mine, theirs in (
        (planned.forward, model.forward),
        (type(planned).forward, Documented.forward),
    ):
        assert inspect.signature(mine) == inspect.signature(theirs)
        assert inspect.getfullargspec(mine) == inspect.getfullargspec(theirs)
        assert mine.__annotations__ == theirs.__annotations__
        assert typing.get_type_hints(mine) == typing.get_type_hints(theirs)
        assert inspect.getdoc(mine) == "Compute rows from rows."
        assert mine.__name__ == "forward"
        assert mine.__qualname__ == theirs.__qualname__
        assert mine.__module__ == theirs.__module__
    assert inspect.getdoc(planned) == inspect.getdoc(model)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, b, y: ((x, b), {"labels": y, "scale": 2.0}),
        lambda x, b, y: ((x,), {"labels": y, "bias": b, "scale": 2.0}),
        lambda x, b, y: ((), {"scale": 2.0, "labels": y, "bias": b, "x": x}),
    ],
    ids=["by place", "one by place", "by name"],
)
@pytest.mark.parametrize("sampled", ["by place", "by name"])
def test_however_a_call_is_written(write, sampled):
    model = Documented()
    x, b, y = rows(0), rows(1), rows(2)
    sample = {"bias": b, "x": x, "labels": y, "scale": 2.0}
    if sampled == "by place":

        class Placed(Documented):
            def forward(self, x, bias, scale, labels=None, mask=None):
                return super().forward(x, bias, scale=scale, labels=labels)

        model, sample = Placed(), (x, b, 2.0, y)
    planned = plan(model, sample, "100%", **SETTINGS)
    ran = runs_of(planned)
    args, kwargs = write(rows(3), rows(4), rows(5))
    loss = planned(*args, **kwargs)
    assert len(ran) == 1
    assert torch.equal(loss, model(*args, **kwargs))


def test_defaults_spelled_out_are_no_other_kind():
    model = Documented()
    planned = plan(model, rows(), "100%", **SETTINGS)
    ran = runs_of(planned)
    planned(rows(), None, labels=None)
    planned(x=rows(), scale=1.0)
    assert len(ran) == 2
    spelled = plan(model, {"x": rows(), "labels": None}, "100%", **SETTINGS)
    ran = runs_of(spelled)
    assert torch.equal(spelled(rows(7)), model(rows(7)))
    assert len(ran) == 1


def test_what_a_forward_could_tell_apart_is_another_kind():
    model = Documented()
    planned = plan(model, {"x": rows(), "scale": 2, "a": rows(1), "b": rows(2)}, "100%", **SETTINGS)
    # Among `**others` the order is the forward's to see; and 2.0 is not 2.
    for given in (
        {"x": rows(), "scale": 2, "b": rows(2), "a": rows(1)},
        {"x": rows(), "scale": 2.0, "a": rows(1), "b": rows(2)},
        {"x": rows(), "scale": 2, "a": rows(1), "b": rows(2), "c": rows(3)},
    ):
        before = len(planned.sn_memory.kinds)
        with warnings.catch_warnings():
            # One more tensor is above a budget that the others take in full.
            warnings.simplefilter("ignore", PlanWarning)
            assert torch.equal(planned(**given), model(**given))
        assert len(planned.sn_memory.kinds) == before + 1


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, factor):
        return self.linear(x) * (torch.arange(4) * factor / 2).round()


def test_numbers_that_only_python_calls_equal():
    model, x = Integers(), torch.randn(3, 4)
    planned = plan(model, (x, True), "100%", **SETTINGS)
    for factor in (1, 1.0):
        assert torch.equal(planned(x, factor), model(x, factor))
        assert "factor is 1" in planned.sn_memory.kinds[-1].unlike


def test_notes_of_others_are_no_other_kind():
    planned = plan(Documented(), rows(), "100%", **SETTINGS)
    planned._is_accelerate_prepared = True
    planned.inner.note = "seen"
    planned.inner[0].count = 3
    ran = runs_of(planned)
    planned(rows())
    assert ran
    both = plan(planned, torch.randn(3, 32), "100%", **SETTINGS)
    ran = runs_of(both)
    for batch in (3, 16):
        both(torch.randn(batch, 32))
    assert len(ran) == 2


class Noting(nn.Module):
    """Trained by its own step, which notes things; some forwards look at them."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(2)
        self.seen, self.losses, self.gain = 0, [], 1.0

    def forward(self, x):
        return self.inner(x) * self.scaled()

    def scaled(self):
        return 2.0

    def step(self, x):
        self.seen += 1
        loss = self(x).sum()
        self.losses.append(loss.item())
        return loss


class ByProperty(Noting):
    @property
    def half(self):
        return sum(it.gain for it in [self]) / 2 if self.gain else 0.0

    def scaled(self):
        return self.half


class ByMethod(Noting):
    def scaled(self):
        return (lambda: self.gain)()


class ByString(Noting):
    def scaled(self):
        return getattr(self, "ga" + "in")


def gain_of(module):
    return module.gain


class ByFunction(Noting):
    def scaled(self):
        return gain_of(self)


class FromInside(Noting):
    class Last(nn.Module):
        def forward(self, x):
            return x * self.around[0].gain

    def __init__(self):
        super().__init__()
        self.inner.append(self.Last())
        self.inner[-1].around = [self]


def test_what_a_training_step_notes_is_no_other_kind():
    planned = plan(Noting(), rows(), "100%", **SETTINGS)
    ran = runs_of(planned)
    for _ in range(3):
        planned.step(rows()).backward()
        planned.zero_grad()
    planned.gain = 3.0  # no forward of this class asks for it
    planned.step(rows())
    assert len(ran) == 4


@pytest.mark.parametrize("kind", [ByProperty, ByMethod, ByString, ByFunction, FromInside])
def test_what_a_forward_reads_is_another_kind(kind):
    model = kind()
    planned = plan(model, rows(), "100%", **SETTINGS)
    model.gain = planned.gain = 3.0
    out = planned(rows())
    assert re.search(r"modes and numbers.*gain", planned.sn_memory.kinds[-1].unlike)
    assert torch.equal(out, model(rows()))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": torch.zeros(3, 32)}, r"x is float32 of shape \(3, 32\), and was .*\(16, 32\)"),
        ({"x": torch.zeros(16, 32), "extra": torch.ones(())}, "extra was not given then"),
        ({"x": torch.zeros(32, 16).t()}, r"strides \(1, 16\)"),
        ({"x": torch.zeros(16, 32), "labels": {1}}, "neither a tensor nor hashable"),
    ],
)
def test_the_reason_is_named(given, says):
    planned = plan(Documented(), rows(), "100%", **SETTINGS)
    if isinstance(given.get("labels"), set):
        planned.eval().train()
        # The model's own error; what it is of no kind for is not its business.
        with pytest.raises(TypeError):
            planned(**given)
        return
    planned(**given)
    assert re.search(says, planned.sn_memory.kinds[-1].unlike)


def test_modes_and_gradients_are_named():
    planned = plan(Documented(), rows(), "100%", **SETTINGS)
    planned.inner[1].eval()
    planned(rows())
    assert "inner.1.training" in planned.sn_memory.kinds[-1].unlike
    planned.inner[1].train()
    planned.inner[0].requires_grad_(False)
    planned(rows())
    assert "other parameters require gradients" in planned.sn_memory.kinds[-1].unlike


def test_a_forward_that_others_put_on_the_instance():
    """As accelerate does for mixed precision: a bound method around ours."""
    model = Documented()
    planned = plan(model, rows(), "100%", **SETTINGS)
    inner = planned.forward.__func__
    calls = []

    def around(self, *args, **kwargs):
        calls.append(1)
        return inner(self, *args, **kwargs)

    planned.forward = around.__get__(planned)
    ran = runs_of(planned)
    assert torch.equal(planned(rows()), model(rows()))
    assert len(ran) == len(calls) == 1
    # The plain one that is compared with must not run the plan, nor a copy want one.
    assert verify(planned, rows()).equal
    assert torch.equal(copy.deepcopy(planned)(rows()), model(rows()))


def by_method(planned):
    planned.compile(backend="eager")
    return planned


def by_function(planned):
    return torch.compile(lambda x: planned(x).sum(), backend="eager")


COMPILED = {
    "module": lambda planned: torch.compile(planned, backend="eager"),
    "method": by_method,
    "inside another": lambda planned: torch.compile(nn.Sequential(planned), backend="eager"),
    "function": by_function,
}


@pytest.mark.parametrize(
    ("way", "backend"),
    [*((it, "graph") for it in COMPILED), ("module", "modules"), ("method", "compile")],
)
def test_torch_compile_of_a_planned_model(way, backend):
    torch._dynamo.reset()
    planned = plan(mlp(2), rows(), "100%", backend=backend, profile=False)
    compiled = COMPILED[way](planned)
    with pytest.raises(TraceError, match=r"Plan with backend='compile'"):
        compiled(rows())


class Around(nn.Module):
    """Calls a planned model among its own layers, between two breaks of the graph if asked."""

    def __init__(self, inner, *, breaks=False):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(32, 32), inner, nn.Linear(32, 32)
        self.breaks = breaks

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.inner(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


def by_its_own_method(planned):
    model = Around(planned)
    model.compile(backend="eager")
    return model


NEIGHBOURS = {
    "a larger module": lambda planned: torch.compile(Around(planned), backend="eager"),
    "its method": by_its_own_method,
    "graph breaks": lambda planned: torch.compile(Around(planned, breaks=True), backend="eager"),
    "one graph": lambda planned: torch.compile(Around(planned), fullgraph=True, backend="eager"),
    "any size": lambda planned: torch.compile(Around(planned), dynamic=True, backend="eager"),
    "autograd too": lambda planned: torch.compile(Around(planned), backend="aot_eager"),
    "exported": lambda planned: torch.export.export(planned, (rows(),)).module(),
}


@pytest.mark.parametrize(
    ("way", "suppressed"), [*((it, False) for it in NEIGHBOURS), ("a larger module", True)]
)
def test_torch_compile_of_what_calls_a_planned_model(way, suppressed):
    torch._dynamo.reset()
    planned = plan(mlp(2), rows(), "100%", **SETTINGS)
    # With one graph or none torch raises its own error, and ours is in it.
    settings = torch._dynamo.config.patch(suppress_errors=suppressed)
    expected = (
        "Export the model without a plan" if way == "exported" else "Plan with backend='compile'"
    )
    with settings, pytest.raises(RuntimeError, match=expected):
        NEIGHBOURS[way](planned)(rows())


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
    mine = planned(many)
    theirs = model(many)
    mine.sum().backward()
    theirs.sum().backward()
    assert same([mine, *grads(planned)], [theirs, *grads(model)])


@pytest.mark.parametrize("way", ["module", "method"])
def test_a_model_that_is_compiled_already(way):
    """Compiled in place, a model answers calls itself, whoever has its attributes."""
    model = COMPILED[way](mlp(2))
    with pytest.raises(TraceError, match="backend='compile'"):
        plan(model, rows(), "100%", **SETTINGS)


# torch.compile asks what its inputs are, and torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_planned_model_beside_compiled_code():
    torch._dynamo.reset()
    planned = plan(mlp(2), rows(), "100%", **SETTINGS)
    ran = runs_of(planned)
    left_out = torch.compiler.disable(planned)
    compiled = torch.compile(lambda x: left_out(x * 2), backend="eager")
    compiled(rows()).sum().backward()
    planned.zero_grad()
    torch.compile(lambda x: x * 2, backend="eager")(planned(rows()))
    assert len(ran) == 2
