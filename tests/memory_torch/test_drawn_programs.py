"""fuzz/programs.py and fuzz/ranks.py in short, and that they see what they look for."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sn_memory.torch import ReplayError

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"


@pytest.fixture(params=["programs", "ranks"])
def script(request, monkeypatch):
    monkeypatch.syspath_prepend(str(FUZZ))
    names = ("loops", "modules", "programs", "ranks", "runner")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield importlib.import_module(request.param)
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


programs = pytest.mark.parametrize("script", ["programs"], indirect=True)
ranks = pytest.mark.parametrize("script", ["ranks"], indirect=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cases"), [("programs", 20), ("ranks", 8)])
def test_drawn_programs_are_right_or_refused(name, cases):
    done = subprocess.run(
        [sys.executable, str(FUZZ / f"{name}.py"), "--cases", str(cases), "--seed", "0"],
        env={**os.environ, "PYTHONPATH": str(FUZZ.parent)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{cases} cases" in done.stdout


def test_a_seed_is_one_program(script):
    assert script.drawn(11) == script.drawn(11) != script.drawn(12)


@programs
def test_what_differs_and_errors_are_seen(script):
    program = script.Program(("GELU",), (1,), "tensor", "plain_steps", "graph", 100, ())
    expected, broken = script.carried_out(program, script.model_of(program))
    assert broken is None
    got, _ = script.carried_out(program, script.model_of(program))
    assert script.compared(program, (expected, None), (got, None), []) == "equal"
    at = [name for name, _ in got.seen].index("1: gradient of layers.0.0.weight")
    name, gradient = got.seen[at]
    for changed in (gradient * (1 + 1e-7), gradient.double(), None):
        got.seen[at] = name, changed
        with pytest.raises(AssertionError, match="differs"):
            script.compared(program, (expected, None), (got, None), [])
    none = script.Log(torch.nn.Linear(1, 1))
    found = script.compared(program, (expected, None), (none, ReplayError("reason")), [])
    assert found.startswith("ReplayError")
    with pytest.raises(AssertionError, match="error of its own"):
        script.compared(program, (expected, None), (none, RuntimeError("raw")), [])
    with pytest.raises(AssertionError, match="no error where plain has one"):
        script.compared(program, (expected, RuntimeError("plain's")), (expected, None), [])


@ranks
def test_ranks_that_differ_or_do_not_follow_plain_are_seen(script, monkeypatch):
    first = {"outcome": "alike", "digests": ["a"], "plain": ["c"], "finite": True}
    first |= {"plain_finite": True, "apart": 0.0, "norms": 1.0}
    answers = [first, first]
    peer = SimpleNamespace(run=lambda program: answers, stop=lambda: None)
    monkeypatch.setattr(script.Peer, "get", classmethod(lambda cls: peer))
    program = script.drawn(0)
    assert script.outcome(program).startswith("alike")
    for second, seen in (
        ({"digests": ["b"]}, "weights of the ranks differ"),
        ({"outcome": "CompressError: it"}, "ranks end apart"),
    ):
        answers[1] = first | second
        with pytest.raises(AssertionError, match=seen):
            script.outcome(program)
    # A mild compression must follow plain.
    program = replace(program, compression="fft, mild")
    most = script.bound(program, 1.0)
    answers[:] = [first | {"apart": 1.01 * most}] * 2
    with pytest.raises(AssertionError, match="from plain's"):
        script.outcome(program)
    answers[:] = [first | {"apart": 0.99 * most}] * 2
    assert script.outcome(program) == "alike: fft, mild"
