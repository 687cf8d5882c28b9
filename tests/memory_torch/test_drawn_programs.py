"""fuzz/programs.py and fuzz/ranks.py in short, and that they see what they look for."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sn_memory.torch import ReplayError

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"


@pytest.fixture(params=["programs", "ranks"])
def script(request, monkeypatch):
    monkeypatch.syspath_prepend(str(FUZZ))
    names = ("modules", "programs", "ranks", "runner")
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
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda it: it, None),
        (lambda it: it * (1 + 1e-7), "differs"),
        (lambda it: it.double(), "differs"),
        (lambda it: None, "differs"),
    ],
)
def test_what_differs_is_seen(script, change, seen):
    program = script.Program(("GELU",), (1,), "tensor", "plain_steps", "graph", 100, ())
    expected, broken = script.carried_out(program, script.model_of(program))
    assert broken is None
    got, _ = script.carried_out(program, script.model_of(program))
    at = [name for name, _ in got.seen].index("1: gradient of layers.0.0.weight")
    got.seen[at] = got.seen[at][0], change(got.seen[at][1])
    if seen is None:
        assert script.compared(program, (expected, None), (got, None), []) == "equal"
        return
    with pytest.raises(AssertionError, match=seen):
        script.compared(program, (expected, None), (got, None), [])


@programs
def test_errors_are_seen(script):
    program = script.Program(("GELU",), (1,), "tensor", "plain_steps", "graph", 100, ())
    expected, _ = script.carried_out(program, script.model_of(program))
    none = script.Log(torch.nn.Linear(1, 1))
    found = script.compared(program, (expected, None), (none, ReplayError("reason")), [])
    assert found.startswith("ReplayError")
    with pytest.raises(AssertionError, match="error of its own"):
        script.compared(program, (expected, None), (none, RuntimeError("raw")), [])
    with pytest.raises(AssertionError, match="no error where plain has one"):
        script.compared(program, (expected, RuntimeError("plain's")), (expected, None), [])


@programs
def test_a_program_is_cut_to_what_it_needs(script, monkeypatch):
    def outcome(program):
        if "GELU" in program.layers:
            raise AssertionError("loss differs: by 1")
        return "equal"

    monkeypatch.setattr(script, "outcome", outcome)
    names = ("LayerNorm", "GELU", "Block")
    whole = script.Program(names, (1, 2, 3), "pair", "retained", "graph", 60, (1, 2))
    least = script.cut(whole, "differs")
    assert (least.layers, least.numbers, least.frozen) == (("GELU",), (2,), ())
    assert (least.form, least.loop, least.percent) == ("tensor", "plain_steps", 100)


@ranks
@pytest.mark.parametrize(
    ("second", "seen"),
    [
        ({}, None),
        ({"digests": ["b"]}, "weights of the ranks differ"),
        ({"outcome": "CompressError: it"}, "ranks end apart"),
    ],
)
def test_ranks_that_differ_are_seen(script, monkeypatch, second, seen):
    first = {
        "outcome": "alike",
        "digests": ["a"],
        "plain": ["c"],
        "finite": True,
        "plain_finite": True,
        "apart": 0.0,
        "norms": 1.0,
    }

    class Peer:
        def run(self, program):
            return first, first | second

        def stop(self):
            pass

    monkeypatch.setattr(script.Peer, "get", classmethod(lambda cls: Peer()))
    program = script.drawn(0)
    if seen is None:
        assert script.outcome(program).startswith("alike")
        return
    with pytest.raises(AssertionError, match=seen):
        script.outcome(program)


@ranks
def test_a_mild_compression_must_follow_plain(script, monkeypatch):
    program = replace(script.drawn(0), compression="fft, mild")
    most = script.bound(program, 1.0)
    first = {"outcome": "alike", "digests": [], "plain": [], "finite": True, "norms": 1.0}
    first |= {"plain_finite": True, "apart": 1.01 * most}

    class Peer:
        def run(self, program):
            return first, first

    monkeypatch.setattr(script.Peer, "get", classmethod(lambda cls: Peer()))
    with pytest.raises(AssertionError, match="from plain's"):
        script.outcome(program)
    first["apart"] = 0.99 * most
    assert script.outcome(program) == "alike: fft, mild"
