"""A planned model passes for its model; how a call is written makes no other kind of input."""

import copy
import inspect
import typing
import warnings

import pytest
import torch
from small_models import mlp
from torch import nn

from sn_memory.torch import PlanWarning, TraceError, plan, verify

SETTINGS = {"profile": False, "planner": "greedy", "backend": "graph"}


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = planned(*args, **kwargs)
    assert len(ran) == 1
    assert torch.equal(loss, model(*args, **kwargs))


def test_defaults_spelled_out_are_no_other_kind():
    model = Documented()
    planned = plan(model, rows(), "100%", **SETTINGS)
    ran = runs_of(planned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
        with pytest.warns(PlanWarning, match="without its plan"):
            out = planned(**given)
        assert torch.equal(out, model(**given))


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
        with pytest.warns(PlanWarning, match="factor is 1"):
            planned(x, factor)


def test_notes_of_others_are_no_other_kind():
    planned = plan(Documented(), rows(), "100%", **SETTINGS)
    planned._is_accelerate_prepared = True
    planned.inner.note = "seen"
    planned.inner[0].count = 3
    ran = runs_of(planned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(rows())
    assert ran
    both = plan(planned, torch.randn(3, 32), "100%", **SETTINGS)
    ran = runs_of(both)
    for batch in (3, 16):
        both(torch.randn(batch, 32))
    assert len(ran) == 2


def test_an_attribute_in_place_of_the_classes_is_another_kind():
    model = Documented()
    planned = plan(model, rows(), "100%", **SETTINGS)
    planned.gain = 3.0
    with pytest.warns(PlanWarning, match=r"modes and numbers.*gain"):
        out = planned(rows())
    assert torch.equal(out, 3.0 * model(rows()))


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
        with pytest.warns(PlanWarning, match=says), pytest.raises(TypeError):
            planned(**given)
        return
    with pytest.warns(PlanWarning, match=says):
        planned(**given)


def test_modes_and_gradients_are_named():
    planned = plan(Documented(), rows(), "100%", **SETTINGS)
    planned.inner[1].eval()
    with pytest.warns(PlanWarning, match=r"inner\.1\.training"):
        planned(rows())
    planned.inner[1].train()
    planned.inner[0].requires_grad_(False)
    with pytest.warns(PlanWarning, match="other parameters require gradients"):
        planned(rows())


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


@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("backend", ["graph", "modules", "compile"])
def test_torch_compile_of_a_planned_model(way, backend):
    torch._dynamo.reset()
    settings = {**SETTINGS, "backend": backend, "compiler": "eager"}
    planned = plan(mlp(2), rows(), "100%", **settings)
    compiled = COMPILED[way](planned)
    with pytest.raises(TraceError, match=r"Plan with backend='compile'"):
        compiled(rows())


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
    torch.compile(lambda x: x * 2, backend="eager")(planned(rows()))
    assert len(ran) == 2
