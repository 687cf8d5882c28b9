"""The way to the calls of a planned step: known kinds at a glance, rows written out, groups."""

import copy
import gc
import re
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from loop_seconds import rows_of
from small_models import Everything, images, mlp, module_of
from steps import rows, same, step_of

from sn_memory.base.errors import PlanWarning, core
from sn_memory.torch import plan
from sn_memory.torch.eager import instructions
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


def outer():
    return module_of(lambda self, x: self.last(self.inner(x)), inner=Rated(), last=torch.nn.Tanh())


def test_a_kind_is_made_out_once(made_out):
    planned = plan(outer(), rows(), "100%", **SETTINGS)
    for _ in range(3):
        step_of(planned, rows())
    assert len(made_out) == 1
    step_of(planned, rows(16))
    step_of(planned, rows(16))
    step_of(planned, rows())
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
    model, x = outer(), rows()
    planned = plan(model, x, "100%", **SETTINGS)
    step_of(planned, x)
    change(model)
    got = step_of(planned, x)
    assert len(made_out) == 2
    assert same(got, step_of(copy.deepcopy(model), x))


def test_what_no_forward_reads_makes_no_other_kind(made_out):
    model = outer()
    planned, x = plan(model, rows(), "100%", **SETTINGS), rows()
    expected = step_of(planned, x)
    model.inner.other, model.last.note, planned.seen = 0.5, [1], 1
    assert same(step_of(planned, x), expected)
    assert len(made_out) == len(planned.sn_memory.kinds) == 1


@pytest.mark.parametrize("outermost", [False, True])
def test_numbers_that_come_and_go_are_not_mistaken(outermost, made_out):
    """A number may lie where one lay that is gone."""
    model, x = Rated() if outermost else outer(), rows()
    planned = plan(model, x, "200%", **SETTINGS)
    # The outermost module is not the planned one.
    rated = [planned, model] if outermost else [model.inner]
    for number in range(1, 9):
        for it in rated:
            # Twice: no step looks in between.
            it.rate = it.rate / 3
            it.rate = number / 8
        expected = step_of(copy.deepcopy(model), x)
        # The third value that differs ends the planning of each.
        with nullcontext() if number != 3 else pytest.warns(PlanWarning, match=r"\brate"):
            got = step_of(planned, x)
        assert same(got, expected), number
        assert same(step_of(planned, x), expected), number
    # The first step's number is that of planning.
    assert len(made_out) == 8


def test_what_is_no_dictionary_is_refused():
    for wrong in (None, [1], ({},)):
        with pytest.raises(TypeError):
            core().contents(wrong)
    with pytest.raises((TypeError, ValueError)):
        core().unchanged(None, [{}])


def test_nothing_is_kept_alive():
    planned = plan(outer(), rows(), "100%", **SETTINGS)
    step_of(planned, rows())
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


def test_a_parameter_of_another_form_is_what_it_is_without_a_plan():
    """Planned for, or refused by torch, and as before when it is as it was."""
    model = outer()
    planned = plan(model, rows(), "100%", **SETTINGS)
    weight = planned.inner.linear.weight
    for other in (weight.data.half(), weight.data.t(), weight.data[:16]):
        step_of(planned, rows())
        planned.zero_grad(set_to_none=True)
        kept, weight.data = weight.data, other
        try:
            expected = step_of(model, rows())
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                planned(rows())
        else:
            assert same(step_of(planned, rows()), expected)
        planned.zero_grad(set_to_none=True)
        weight.data = kept
    step_of(planned, rows())


@pytest.mark.parametrize("part", [3, 1000])
def test_written_out_is_as_checked(part, monkeypatch):
    """Dropout that is made again, batch norm, views: the same bits, and buffers changed once."""
    model = Everything()
    planned = plan(copy.deepcopy(model), images(), "75%", **SETTINGS)
    assert planned.sn_memory.plan.decided("recompute")
    program = planned.sn_memory.latest.program
    monkeypatch.setattr(instructions, "PART", part)
    for count in range(4):
        torch.manual_seed(count)
        got = step_of(planned, images())
        torch.manual_seed(count)
        expected = step_of(model, images())
        assert same(got, expected)
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
