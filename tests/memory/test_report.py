"""Reports: what they say adds up, whatever the plan does; the page stands on its own."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from sn_cli.main import main
from sn_memory import (
    Action,
    Decision,
    Device,
    Graph,
    MissingExtra,
    Op,
    Plan,
    PlanError,
    Storage,
    Workspace,
    check_plan,
)
from sn_memory.base.sizes import show_seconds
from sn_memory.plan import policies
from sn_memory.report.figure import LAYERS, figure, owner_groups, top_owners
from sn_memory.report.report import report

CHAIN = Graph(
    [
        Storage("w", 100, "parameter"),
        Storage("a", 1000),
        Storage("b", 500),
        Storage("c", 700),
        Storage("g<1>", 300, "gradient", keep=True),
    ],
    [
        Op("f1", ("w",), ("a",), kind="conv", seconds=1.0),
        Op("f2", ("a",), ("b",), kind="relu", seconds=0.5),
        Op("f3", ("b",), ("c",), kind="conv", seconds=2.0, workspaces=(Workspace(250),)),
        Op("b1", ("a", "c"), ("g<1>",), phase="backward", kind="conv", seconds=3.0),
    ],
    name="chain",
    device=Device(to_host_bytes_per_s=1000.0, to_device_bytes_per_s=1000.0),
)


def plan_of(actions, peak, seconds, *decisions, **fields):
    parsed = tuple(Action(*it.split()) for it in actions.split(", ") if it)
    usual = {"planner": "by hand", "lower_bound_seconds": 6.5, "baseline_peak_bytes": 2550,
             "baseline_seconds": 6.5}  # fmt: skip
    return Plan(parsed, decisions, peak_bytes=peak, seconds=seconds, **(usual | fields))


RECOMPUTE = plan_of(
    "run f1, run f2, free a, run f3, free b, run f1, run b1, free a, free c",
    # f1 again: w + c + a = 1800; b1: w + a + c + g<1> = 2100.
    2100,
    7.5,
    Decision("a", "recompute", "cheap & <quick>", 1000, 1.0),
    Decision("b", "keep"),
    budget_bytes=2200,
)
OFFLOAD = plan_of(
    "run f1, run f2, offload a, free a, run f3, free b, prefetch a, run b1, free a, free c",
    2100,
    8.5,
    Decision("a", "offload", "", 1000, 2.0),
)


def liveness(graph):
    return policies.policy("liveness")(graph, budget_bytes=None)


def test_peaks_and_owners_of_a_chain():
    found = report(CHAIN, RECOMPUTE)
    assert (found.before.peak_bytes, found.before.peak_at) == (2550, "run f3")
    assert dict(found.before.owners) == {
        "a": 1000, "c": 700, "b": 500, "scratch of f3": 250, "resident": 100,
    }  # fmt: skip
    assert (found.after.peak_bytes, found.after.peak_at) == (2100, "run b1")
    assert dict(found.after.owners) == {"a": 1000, "c": 700, "g<1>": 300, "resident": 100}
    assert dict(owner_groups(found, found.after)) == {
        "2 conv outputs": 1700, "1 gradient": 300, "resident": 100,
    }  # fmt: skip


def test_the_curve_is_that_of_the_replay_and_scratch_is_the_layer_on_top():
    found = report(CHAIN, RECOMPUTE)
    # A free takes no time: what is there at a time is what its last action left.
    assert set(found.before.time_s.tolist()) == {0.0, 1.0, 1.5, 3.5, 6.5}
    starts = [0, 1, 2, 4]
    assert found.before.bytes[starts].tolist() == [1100, 1600, 2550, 2100]
    layers = {name: size.tolist() for name, size in found.before.layers}
    assert list(layers) == ["weights, inputs, state", "activations", "gradients", "scratch"]
    assert [layers["scratch"][at] for at in starts] == [0, 0, 250, 0]
    assert [layers["activations"][at] for at in starts] == [1000, 1500, 2200, 1700]
    assert found.before.peak_layers == (
        ("weights, inputs, state", 100), ("activations", 2200), ("scratch of f3", 250),
    )  # fmt: skip
    before, after = found.text().split("peak after")
    assert re.search(r"activations +2.148 KiB +86%\n  scratch of f3 +250 B +10%\n", before)
    # b1 sets the peak, and takes none.
    assert "scratch" not in after
    replay = check_plan(CHAIN, RECOMPUTE)
    # During a free the replay counts what goes; a layer is without it from that moment on.
    stays = [it.kind != "free" for it in RECOMPUTE.actions]
    assert found.after.bytes[:-1][stays].tolist() == replay.live_bytes[stays].tolist()
    assert found.after.time_s[-1] == 7.5
    assert np.all(np.diff(found.after.time_s) >= 0)


def test_reserved_bytes_are_told_of_plans_for_a_card():
    assert "reserved" not in report(CHAIN, RECOMPUTE).text()
    card = {"reserved_peak_bytes": 2200, "pool_bytes": 2100, "allocator": "torch, expandable"}
    found = report(CHAIN, replace(RECOMPUTE, **card))
    assert (
        "reserved 2.148 KiB, 5% above the peak after, by torch, expandable; the step's pool begins"
        " with 2.051 KiB\n"
    ) in found.text()
    assert "Reserved 2.148 KiB, 5% above" in found.html()


def test_the_picture_stacks_what_the_curve_holds():
    card = replace(RECOMPUTE, reserved_peak_bytes=2600, allocator="torch")
    for plan, more in ((RECOMPUTE, set()), (card, {"reserved 2.539 KiB"})):
        axes = figure(report(CHAIN, plan)).axes[0]
        assert {it.get_text() for it in axes.get_legend().get_texts()} == {
            "before", "after", "budget 2.148 KiB", "weights, inputs, state", "activations",
            "gradients", "scratch", *more,
        }  # fmt: skip
        assert axes.get_ylim()[1] * 1024 > max(2550, 2600 if more else 0)
    # Where a plan runs an op with scratch, that is a layer of its own, in a colour of its own.
    found = report(CHAIN, liveness(CHAIN))
    axes = figure(found).axes[0]
    stacked = {it.get_label(): it for it in axes.patches if it.get_label() in LAYERS}
    assert list(stacked) == list(LAYERS)
    assert len({tuple(it.get_facecolor()) for it in stacked.values()}) == len(LAYERS)
    tops = [it.get_path().vertices[:, 1].max() * 1024 for it in stacked.values()]
    assert tops[-1] == found.after.peak_bytes


def test_text_names_decisions_reasons_and_others():
    text = report(CHAIN, RECOMPUTE, others=[OFFLOAD]).text()
    assert text.startswith("chain: 2.49 KiB → 2.051 KiB (18% less memory) for +15.4% time\n")
    assert re.search(r"a +1000 B +recompute +1 s +cheap & <quick>", text)
    assert "keep" not in text.split("decisions")[1].split("beside")[0]
    assert re.search(r"by hand +- +2.051 KiB +8.5 s +\+30.8%", text)
    assert str(report(CHAIN, RECOMPUTE, others=[OFFLOAD])) == text


def test_long_lists_are_cut_and_summed_up():
    decisions = tuple(Decision("a", "recompute", "", size) for size in range(1, 101))
    found = report(CHAIN, replace(RECOMPUTE, decisions=decisions))
    assert "and 95 smaller ones, 4.453 KiB together" in found.text(rows=5)
    assert top_owners(found.after, 2)[-1] == ("2 others", 400)
    assert sum(size for _, size in top_owners(found.after, 2)) == 2100


def test_a_plan_that_breaks_its_promise_gets_no_report():
    with pytest.raises(PlanError, match="peak_bytes"):
        report(CHAIN, replace(RECOMPUTE, peak_bytes=2099))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(policies.names()))
def test_owners_sum_to_the_peak_whatever_the_plan(seed, name):
    graph = random_graph(seed)
    plan = policies.policy(name)(graph, budget_bytes=None)
    found = report(graph, plan)
    assert found.after.peak_bytes == plan.peak_bytes
    for curve in (found.before, found.after):
        assert curve.bytes.max() == curve.peak_bytes
        assert np.array_equal(np.sum([size for _, size in curve.layers], 0), curve.bytes)
        for owners in (curve.owners, curve.peak_layers, owner_groups(found, curve)):
            assert sum(size for _, size in owners) == curve.peak_bytes
    assert found.text()


def test_picture_and_page(tmp_path):
    found = report(CHAIN, RECOMPUTE, others=[OFFLOAD, replace(OFFLOAD, planner="again")])
    found.write_png(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    found.write_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "cheap &amp; &lt;quick&gt;" in page
    assert "g&lt;1&gt;" in page
    # Nothing is loaded from anywhere: the only source is the picture itself, no scripts, no styles.
    assert re.findall(r'(?:src|href)="([^"]{0,22})', page) == ["data:image/png;base64,"]
    assert not re.search(r"<script|<link|url\(", page)


def test_picture_of_a_graph_without_ops(tmp_path):
    graph = Graph([Storage("w", 8, "parameter")], [])
    report(graph, liveness(graph)).write_png(tmp_path / "memory.png")


def test_long_curves_keep_their_peak():
    storages = [Storage(f"s{at}", 1 + at % 97) for at in range(9000)]
    graph = Graph(storages, [Op(f"o{at}", (), (f"s{at}",), seconds=1.0) for at in range(9000)])
    found = report(graph, liveness(graph))
    assert len(found.before.time_s) <= 2000
    assert found.before.bytes.max() == 97 == found.before.peak_bytes


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    for name in ("matplotlib.figure", *(it for it in sys.modules if it.startswith("matplotlib"))):
        monkeypatch.setitem(sys.modules, name, None)
    found = report(CHAIN, RECOMPUTE)
    assert found.text()
    with pytest.raises(MissingExtra, match=r"superneurons\[report\]"):
        found.write_png(tmp_path / "memory.png")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us")]
)
def test_times_for_people(seconds, text):
    assert show_seconds(seconds) == text


def test_command_writes_page_and_picture(tmp_path, capsys):
    CHAIN.to_json(tmp_path / "graph.json")
    RECOMPUTE.to_json(tmp_path / "plan.json")
    files = [str(tmp_path / name) for name in ("graph.json", "plan.json", "r.html", "r.png")]
    asked = ["report", *files[:2], "-o", files[2], "--png", files[3]]
    assert main(["memory", *asked, "--against", "liveness,sqrt_n"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("chain: 2.49 KiB")
    assert "liveness" in shown
    assert (tmp_path / "r.html").stat().st_size > (tmp_path / "r.png").stat().st_size > 1000
