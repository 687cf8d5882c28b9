"""Progress: records for programs, a bar or lines for people, and nothing where nobody looks on."""

import builtins
import io
import re
import sys

import pytest
from random_graphs import training_chain

from sn_memory import Progress, plan_graph
from sn_memory.base.progress import _Lines, progress_output, report_progress


class Screen(io.StringIO):
    """Standard error as a terminal has it, or as a file."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture(params=[False, True], ids=["file", "terminal"])
def screen(request):
    return Screen(request.param)


def some():
    for done in range(3):
        report_progress("time ops", done, 3)
    report_progress("search", 0.5, 60.0, "greedy: best 1 s a step")


@pytest.mark.parametrize("wanted", [None, False, True])
def test_who_is_told(screen, wanted, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_output(wanted):
        some()
    some()  # outside, nobody listens
    told = wanted or (wanted is None and screen.terminal)
    assert bool(screen.getvalue()) is told
    if told:
        assert "time ops" in screen.getvalue()
        assert "greedy: best 1 s a step" in screen.getvalue()


def test_a_file_gets_lines_and_a_terminal_a_bar(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_output(True):
        some()
    text = screen.getvalue()
    assert ("\r" in text) is screen.terminal
    if not screen.terminal:
        # The first of a stage, and the last; the time left is told where some has passed.
        said = [line.split(", ", 1)[1] for line in text.splitlines()]
        assert len(said) == 3
        assert said[0] == "time ops 0 of 3 (0%)"
        assert re.fullmatch(r"time ops 2 of 3 \(67%(, \d+ s left)?\)", said[1])
        left = r"search 0\.5 of 60 \(1%(, \d+ s left)?\): greedy: best 1 s a step"
        assert re.fullmatch(left, said[2])


def test_the_time_left_is_that_of_the_rest_at_this_rate():
    lines = _Lines("")
    lines.began = 10.0  # when the stage began
    assert lines.far(Progress("search", 15.0, 60.0, 25.0)) == " (25%, 45 s left)"
    assert lines.far(Progress("time ops", 0, 3, 25.0)) == " (0%)"
    assert lines.far(Progress("search", 90.0, 60.0, 100.0)) == " (100%, 0 s left)"


def test_without_tqdm_a_terminal_gets_lines_and_the_reason(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    screen = Screen(terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_output(None):
        some()
    first, *others = screen.getvalue().splitlines()
    assert first.startswith("sn_memory: tqdm is not installed")
    assert "superneurons[progress]" in first
    assert len(others) == 3


def test_programs_get_records(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    told = []
    with progress_output(told.append):
        some()
    assert not screen.getvalue()
    assert all(isinstance(it, Progress) for it in told)
    assert (told[-1].stage, told[-1].done, told[-1].total) == ("search", 0.5, 60.0)
    assert [it.seconds for it in told] == sorted(it.seconds for it in told)


def test_what_a_program_raises_ends_planning():
    def stop(it):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_graph(training_chain(6), "70%", progress=stop)
    assert plan_graph(training_chain(6), "70%").peak_bytes


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="got progress 'yes'"):
        plan_graph(training_chain(3), "80%", progress="yes")


def test_listening_does_not_change_the_plan():
    graph = training_chain(6)
    quiet = plan_graph(graph, "70%", deterministic=True)
    assert plan_graph(graph, "70%", deterministic=True, progress=[].append) == quiet
