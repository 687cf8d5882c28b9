"""The way to the calls of a planned step: known kinds at a glance, rows written out, groups."""

import copy
import gc
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from loop_seconds import rows_of
from small_models import Everything, images, mlp
from steps import grads, rows, same

from sn_memory.base.errors import PlanWarning, core
from sn_memory.torch import plan
from sn_memory.torch.eager import instructions
from sn_memory.torch.errors import ReplayError
from sn_memory.torch.model import guards

SETTINGS = {"profile": False, "planner": "sqrt_n"}


@pytest.fixture(params=["compiled", "in Python"])
def made_out(monkeypatch, request):
    """How often a kind was made out from all that the modules have."""
    if request.param == "in Python":
        changed = SimpleNamespace(contents=lambda _: None, unchanged=lambda *_: False)
        monkeypatch.setattr(guards, "core", lambda: changed)
    times = []
    own = guards.signature_of
    monkeypatch.setattr(guards, "signature_of", lambda *given: times.append(1) or own(*given))
    return times


class Rated(torch.nn.Module):
    """A rate, a number in a list, and an object that is no setting."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.rate, self.scales, self.unit, self.other = 0.5, [2.0], object(), object()

    def forward(self, x):
        x = self.linear(x) * self.rate * self.scales[0]
        return x * self.unit if isinstance(self.unit, float) else x


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Rated()
        self.last = torch.nn.Tanh()

    def forward(self, x):
        return self.last(self.inner(x))


def step(model, x):
    for it in model.parameters():
        it.grad = None
    loss = model(x).square().sum()
    loss.backward()
    return [loss.detach(), *grads(model)]


def test_a_kind_is_made_out_once(made_out):
    planned = plan(Outer(), rows(), "100%", **SETTINGS)
    for _ in range(3):
        step(planned, rows())
    assert len(made_out) == 1
    step(planned, rows(16))
    step(planned, rows(16))
    step(planned, rows())
    assert len(made_out) == 2


# Those of test_mutations.py that dictionaries hold otherwise.
CHANGES = {
    "a rate": lambda it: setattr(it.inner, "rate", 0.25),
    "a number in a list": lambda it: it.inner.scales.__setitem__(0, 3.0),
    "a mode": lambda it: it.inner.eval(),
    "no bias": lambda it: setattr(it.inner.linear, "bias", None),
    "an object that is now a number": lambda it: setattr(it.inner, "unit", 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen(change, made_out):
    model, x = Outer(), rows()
    planned = plan(model, x, "100%", **SETTINGS)
    step(planned, x)
    change(model)
    got = step(planned, x)
    assert len(made_out) == 2
    assert same(got, step(copy.deepcopy(model), x))


def test_what_no_forward_reads_makes_no_other_kind(made_out):
    model = Outer()
    planned, x = plan(model, rows(), "100%", **SETTINGS), rows()
    expected = step(planned, x)
    model.inner.other, model.last.note, planned.seen = 0.5, [1], 1
    assert all(map(torch.equal, step(planned, x), expected))
    assert len(made_out) == len(planned.sn_memory.kinds) == 1


def test_numbers_that_come_and_go_are_not_mistaken(made_out):
    """A number may lie where one lay that is gone."""
    model = Outer()
    planned = plan(model, rows(), "100%", **SETTINGS)
    x = rows()
    for number in range(1, 9):
        model.inner.rate = number / 8
        expected = step(copy.deepcopy(model), x)
        # The third value that differs ends the planning of each.
        with nullcontext() if number != 3 else pytest.warns(PlanWarning, match="inner.rate"):
            got = step(planned, x)
        assert all(map(torch.equal, got, expected)), number
    assert len(made_out) == 8


def test_numbers_of_the_outermost_module_are_not_mistaken_either(made_out):
    model = Rated()
    planned = plan(model, rows(), "200%", **SETTINGS)
    x = rows()
    for number in range(1, 9):
        # Twice: no step looks in between.
        planned.rate = planned.rate / 3
        planned.rate = model.rate = number / 8
        expected = step(copy.deepcopy(model), x)
        with nullcontext() if number != 3 else pytest.warns(PlanWarning, match="value of rate"):
            got = step(planned, x)
        assert all(map(torch.equal, got, expected)), number
        assert all(map(torch.equal, step(planned, x), expected)), number
    # The first step's number is that of planning.
    assert len(made_out) == 8


def test_what_dictionaries_held_is_compared_by_address():
    first, second = {"a": 1000.5, "b": []}, {}
    held = core().contents([first, second])
    assert core().unchanged(held, [first, second])
    first["b"].append(1)
    assert core().unchanged(held, [first, second])
    for others in ([first], [second, first], [dict(first), second], []):
        assert not core().unchanged(held, others)
    second["c"] = 1
    assert not core().unchanged(held, [first, second])
    del second["c"]
    assert core().unchanged(held, [first, second])
    first["a"] = float("1000.5")
    assert not core().unchanged(held, [first, second])
    del first["a"], first["b"]
    first["b"], first["a"] = [], 0
    assert not core().unchanged(held, [first, second])
    for wrong in (None, [1], ({},)):
        with pytest.raises(TypeError):
            core().contents(wrong)
    with pytest.raises((TypeError, ValueError)):
        core().unchanged(None, [first])


def test_nothing_is_kept_alive():
    planned = plan(Outer(), rows(), "100%", **SETTINGS)
    step(planned, rows())
    old = weakref.ref(planned.inner.linear.weight)
    planned.inner.linear.weight = torch.nn.Parameter(torch.zeros(32, 32))
    assert old() is None
    model = weakref.ref(planned)
    gc.disable()
    try:
        del planned
        assert model() is None
    finally:
        gc.enable()


def test_a_parameter_of_another_type_is_refused():
    planned = plan(Outer(), rows(), "100%", **SETTINGS)
    step(planned, rows())
    planned.zero_grad(set_to_none=True)
    weight = planned.inner.linear.weight
    for other in (weight.data.half(), weight.data.t(), weight.data[:16]):
        kept, weight.data = weight.data, other
        with pytest.raises(ReplayError, match="a parameter, buffer or input has size"):
            planned(rows())
        weight.data = kept
    step(planned, rows())


def test_written_out_is_as_checked():
    """Dropout that is made again, batch norm, views: the same bits, and buffers changed once."""
    model = Everything()
    planned = plan(copy.deepcopy(model), images(), "75%", **SETTINGS)
    assert planned.sn_memory.plan.decided("recompute")
    program = planned.sn_memory.latest.program
    for count in range(4):
        torch.manual_seed(count)
        got = step(planned, images())
        torch.manual_seed(count)
        expected = step(model, images())
        assert all(map(torch.equal, got, expected))
        assert same(planned.buffers(), model.buffers())
    rows_of_program = [program.forward, *(it.row for it in program.backward)]
    assert all(it.is_checked and not it.instructions for it in rows_of_program)


def test_threads_write_a_row_at_a_time(monkeypatch):
    """Each begins before another has written all of it, and does all of it."""
    monkeypatch.setattr(instructions, "PART", 3)
    names = instructions.Names()
    ran = {}

    def note(number):
        def instruction(memory):
            ran[threading.get_ident()].append(number)
            time.sleep(1e-4)

        return instruction

    def run():
        ran[threading.get_ident()] = []
        start.wait()
        row.run(SimpleNamespace(held=[]))

    row = instructions.Row([note(number) for number in range(50)], names)
    row.is_checked = True
    start = threading.Barrier(6)
    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(ran.values()) == [list(range(50))] * 6


def test_small_gradients_end_few_sections():
    planned = plan(mlp(40), rows(), "100%", **SETTINGS)
    sections = planned.sn_memory.latest.program.backward
    assert 4 <= len(sections) <= 9
    handed = [place for it in sections for place in it.ready]
    assert sorted(handed) == list(range(len([*planned.parameters()])))


def test_the_benchmark_runs():
    for row in rows_of("linear", 8, 3, time_limit_s=0.5):
        assert row["equal"]
        assert row["made"] >= row["calls"] > 40
        assert min(row["own_us"], row["planned_us"], row["before_us"]) > 0
