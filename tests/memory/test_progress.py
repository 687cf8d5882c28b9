"""Progress: records for programs, lines for people, and nothing where nobody looks on."""

import io
import re
import sys

import pytest
from random_graphs import training_chain

from sn_memory import Progress, plan_graph
from sn_memory.base.progress import _Printer, progress_output, report_progress


class Screen(io.StringIO):
    """Standard error as a terminal has it, or as a file."""

    terminal = False

    def isatty(self):
        return self.terminal


@pytest.fixture(params=[False, True], ids=["file", "terminal"])
def screen(request):
    screen = Screen()
    screen.terminal = request.param
    return screen


def some():
    for done in range(3):
        report_progress("time ops", done, 3)
    report_progress("search", 0.5, 60.0, "greedy: best 1 s a step")


@pytest.mark.parametrize("wanted", [None, False, True])
def test_a_file_gets_lines_and_a_terminal_one(screen, wanted, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_output(wanted):
        some()
    some()  # outside, nobody listens
    text = screen.getvalue()
    if wanted is False or (wanted is None and not screen.terminal):
        assert not text
        return
    assert "time ops" in text
    assert "greedy: best 1 s a step" in text
    assert ("\r" in text) is screen.terminal
    if not screen.terminal:
        # The first of a stage, and the last; the time left is told where some has passed.
        first, second, search = (line.split(", ", 1)[1] for line in text.splitlines())
        assert first == "time ops 0 of 3 (0%)"
        assert re.fullmatch(r"time ops 2 of 3 \(67%(, \d+ s left)?\)", second)
        left = r"search 0\.5 of 60 \(1%(, \d+ s left)?\): greedy: best 1 s a step"
        assert re.fullmatch(left, search)


def test_the_time_left_is_that_of_the_rest_at_this_rate():
    lines = _Printer()
    lines.began = 10.0  # when the stage began
    assert lines.far(Progress("search", 15.0, 60.0, 25.0)) == " (25%, 45 s left)"
    assert lines.far(Progress("time ops", 0, 3, 25.0)) == " (0%)"
    assert lines.far(Progress("search", 90.0, 60.0, 100.0)) == " (100%, 0 s left)"


def test_programs_get_records_and_the_same_plan(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen)
    records = []
    with progress_output(records.append):
        some()
    assert not screen.getvalue()
    assert all(isinstance(it, Progress) for it in records)
    assert (records[-1].stage, records[-1].done, records[-1].total) == ("search", 0.5, 60.0)
    assert [it.seconds for it in records] == sorted(it.seconds for it in records)
    graph, settings = training_chain(6), {"deterministic": True, "progress": records.append}
    assert plan_graph(graph, "70%", **settings) == plan_graph(graph, "70%", deterministic=True)


def test_what_a_program_raises_ends_planning():
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_graph(training_chain(6), "70%", progress=stop)
    assert plan_graph(training_chain(6), "70%").peak_bytes


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="got progress 'yes'"):
        plan_graph(training_chain(3), "80%", progress="yes")
