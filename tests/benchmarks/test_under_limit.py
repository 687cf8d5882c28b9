"""What trains under one hard limit: the figures of the docs, and the command on a small net."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
import under_limit
import under_limit_report as report

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/under_limit.json").read_text())
TINY = {
    "task": "resnet", "update": "early", "size": 1, "steps": 2, "time_limit_s": 2.0,
    "width": 4, "side": 32,
}  # fmt: skip


def reached(task):
    """Per limit, what each way reached."""
    for found, limit, ways in report.searches(ROWS):
        if found == task:
            yield limit, {way: row for way, rows in ways.items() if (row := report.largest(rows))}


@pytest.mark.parametrize(("task", "times"), [("resnet", 3.24), ("gpt2", 4.0)])
def test_ours_goes_so_many_times_as_far_as_torch(task, times):
    searches = list(reached(task))
    assert searches
    for _, best in searches:
        assert report.reach(best["ours"]) >= times * report.reach(best["plain"])
        assert report.reach(best["ours"]) > report.reach(best["checkpoint"])


def test_what_trained_stayed_within_the_limit_and_all_else_ran_out_of_it():
    for row in ROWS:
        if row["trained"]:
            assert report.resident(row) <= row["limit_bytes"]
        else:
            assert row["out_of_memory"] or "BudgetError" in row["error"]


def test_all_ways_compute_the_same():
    """Losses of steps from the same start; the second is after an update of all parameters."""
    seen = 0
    for row in ROWS:
        if row["way"] != "plain" and row["trained"] and "tensorflow" not in row["task"]:
            for other in ROWS:
                same = all(other[key] == row[key] for key in ("task", "size", "update"))
                if same and other["way"] == "plain" and other["trained"]:
                    assert row["losses"] == pytest.approx(other["losses"], rel=1e-5)
                    seen += 1
    assert seen


def test_the_page_is_as_the_rows_are():
    assert report.main(["--check"]) == 0


def test_the_search_doubles_and_halves():
    asked = []

    def run(size):
        asked.append(size)
        return size <= 37

    assert under_limit.largest(run, 10, grain=0.0, step=1) == 37
    assert asked[:4] == [10, 20, 40, 30]
    assert under_limit.largest(lambda size: size <= 3, 8, grain=0.0, step=1) == 3
    assert under_limit.largest(lambda _: False, 8, grain=0.0, step=1) == 0


@pytest.mark.slow  # three processes that import torch and transformers
def test_a_trial_trains_within_its_limit_or_runs_out_of_it():
    enough = TINY | {"limit_bytes": 192 << 20, "margin_bytes": 160 << 20}
    plain = under_limit.trial(enough | {"way": "plain"}, timeout_s=600)
    ours = under_limit.trial(enough | {"way": "ours"}, timeout_s=600)
    assert plain["trained"]
    assert ours["trained"]
    assert ours["losses"] == plain["losses"]
    assert ours["predicted_bytes"] <= ours["budget_bytes"] == 32 << 20
    few = TINY | {"limit_bytes": 6 << 20, "way": "plain"}
    starved = under_limit.trial(few, timeout_s=600)
    assert not starved["trained"]
    assert starved["out_of_memory"]
