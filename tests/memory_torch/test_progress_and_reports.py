"""What a planned torch model says of itself, and planning while it is at work; its time limit."""

import inspect
import sys
import time

import pytest
import torch
from small_models import mlp, module_of

import sn_memory.torch
from sn_memory import PlanError
from sn_memory.base import progress
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import TraceError, plan
from sn_memory.torch.trace import op_seconds

QUIET = {"profile": False}


def network(depth=5):
    return mlp(depth, 48)


@pytest.fixture(scope="module")
def planned():
    return plan(network(), torch.zeros(64, 48), "80%", **QUIET)


def test_a_planned_model_is_told_in_five_lines(planned):
    lines = repr(planned.sn_memory).splitlines()
    assert len(lines) == 5
    made = planned.sn_memory.plan
    assert lines[:4] == repr(made).splitlines()
    assert lines[0].startswith("Plan of Sequential by auto")
    assert lines[1].startswith("budget ")
    assert f"{len(made.decided('recompute'))} recomputed" in lines[2]
    assert "0 offloaded" in lines[2]
    assert lines[3].startswith("a step takes ")
    assert lines[4] == "back end graph, planned for 1: input (64, 48)"


def test_other_inputs_are_told_too():
    model = plan(network(), torch.zeros(64, 48), "80%", **QUIET)
    for rows in (8, 16, 24, 32):
        model(torch.zeros(rows, 48)).sum().backward()
    assert repr(model.sn_memory).splitlines()[-1] == (
        "back end graph, planned for 5: input (64, 48); input (8, 48); input (16, 48); and 2 more"
    )


def test_a_plan_by_modules_is_told_in_five_lines():
    record = plan(network(), torch.zeros(64, 48), "200%", backend="modules").sn_memory
    lines = repr(record).splitlines()
    assert len(lines) == 5
    assert lines[0] == "Plan by measured steps"
    assert lines[4].startswith("back end modules, planned for 1: ")
    assert "<img" not in record._repr_html_()
    with pytest.raises(PlanError, match="cannot be traced"):
        record.report("nowhere.html")


def test_a_notebook_shows_the_picture_and_a_report_is_a_page(planned, tmp_path):
    shown, page = planned.sn_memory._repr_html_(), planned.sn_memory.report()
    assert "budget " in shown
    assert shown.count("<img") == 1
    assert 'src="data:image/png;base64,' in shown
    assert page.startswith("<!DOCTYPE html>")
    assert "http" not in shown + page
    assert planned.sn_memory.report(tmp_path / "page.html") is None
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_without_matplotlib_a_notebook_says_so(planned, monkeypatch):
    for name in [it for it in sys.modules if it.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = planned.sn_memory._repr_html_()
    assert "superneurons[report]" in shown
    assert "<img" not in shown


def test_the_stages_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(sn_memory.settings, "progress", told.append)
    plan(network(), torch.zeros(64, 48), "80%")
    stages = list(dict.fromkeys(it.stage for it in told))
    assert stages == ["trace", "time ops", "search", "trial"]
    timed = [it for it in told if it.stage == "time ops"]
    assert [it.done for it in timed[:2]] == [0, 1]
    assert all(it.done < it.total for it in timed)


def test_counted_work_gives_the_same_plan_whatever_the_clock(monkeypatch, counted_work):
    settings = {"backend": "graph", "time_limit_s": 0.02, **QUIET}
    first = plan(network(depth=8), torch.zeros(64, 48), "70%", **settings).sn_memory.plan
    real = time.perf_counter
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 1000 * real())
    second = plan(network(depth=8), torch.zeros(64, 48), "70%", **settings).sn_memory.plan
    assert second.to_json() == first.to_json()
    assert first.solve_s >= 0.02 * (1 - 0.2)


def test_what_is_measured_cannot_be_the_same_everywhere(counted_work):
    for settings in ({}, {"profile": False, "backend": "modules"}):
        with pytest.raises(ValueError, match="measured seconds differ"):
            plan(network(), torch.zeros(64, 48), "80%", **settings)

    branches = module_of(lambda self, x: self.inner(x if x.sum() > 0 else -x), inner=mlp(2))
    with pytest.raises(TraceError):
        plan(branches, torch.zeros(4, 32), "80%", **QUIET)


@pytest.mark.rule_of_scratch  # Measured it would be timed here.
def test_timing_ops_and_searching_share_the_limit(monkeypatch):
    """Each op takes a fifth of a second to time here, and there are more than there is time for."""

    def slow(call, recording, device):
        time.sleep(0.2)
        return 1e-4, 0

    monkeypatch.setattr(op_seconds, "_cost", slow)
    model = torch.nn.Sequential(*(torch.nn.Linear(8 + at, 9 + at) for at in range(12)))
    sample = torch.zeros(4, 8)
    sn_memory.torch.trace(model, sample, profile=False)
    began = time.perf_counter()
    with pytest.warns(PlanWarning, match="not timed within half of the time limit"):
        made = plan(model, sample, "100%", time_limit_s=2.0, backend="graph")
    # Recording comes on top, and what its devices can do.
    assert time.perf_counter() - began < 2.0 * 1.1 + 2
    sources = made.sn_memory.plan.seconds_sources
    assert sources["measured"] >= 3
    assert sources["roofline"] >= 10


def test_the_keywords_are_nine():
    kinds = inspect.signature(plan).parameters.values()
    assert [it.name for it in kinds if it.kind is it.KEYWORD_ONLY] == [
        *("planner", "techniques", "backend", "profile", "device", "optimizer", "state"),
        *("time_limit_s", "strict"),
    ]


def test_settings_of_the_process_are_checked():
    with pytest.raises(TypeError, match="expected True or False"):
        sn_memory.settings.deterministic = 1
    with pytest.raises(AttributeError, match="expected one of deterministic, progress"):
        sn_memory.settings.determinstic = True
