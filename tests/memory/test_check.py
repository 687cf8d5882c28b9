"""The checker: takes what can be carried out, and names the first thing that cannot."""

from dataclasses import replace

import pytest
from random_graphs import training_chain

from sn_memory import (
    Action,
    BudgetError,
    Decision,
    Device,
    Graph,
    Op,
    Plan,
    PlanError,
    Storage,
    Workspace,
    check_plan,
    plan_graph,
)
from sn_memory.graph.liveness import holes
from sn_memory.plan.bound import smallest_peak
from sn_memory.plan.policies import policy

STORAGES = [
    Storage("x", 10, "input"),
    Storage("h1", 100),
    Storage("h2", 100),
    Storage("loss", 4, keep=True),
    Storage("g2", 100, "gradient"),
    Storage("g1", 10, "gradient", keep=True),
]
OPS = [
    Op("f1", ("x",), ("h1",), seconds=1.0),
    Op("f2", ("h1",), ("h2",), seconds=1.0),
    Op("f3", ("h2",), ("loss",), seconds=1.0),
    Op("b3", ("h2",), ("g2",), seconds=1.0, phase="backward"),
    Op("b2", ("h1", "g2"), ("g1",), seconds=1.0, phase="backward"),
]
LANES = Device(to_host_bytes_per_s=50.0, to_device_bytes_per_s=100.0, transfer_latency_s=0.5)
PLAIN, LINKED = Graph(STORAGES, OPS), Graph(STORAGES, OPS, device=LANES)
RUNS = ("run f1", "run f2", "run f3", "run b3", "run b2")


def first_op(**fields):
    """The graph whose first op differs."""
    return Graph(STORAGES, [replace(OPS[0], **fields), *OPS[1:]])


def plan(*actions, peak=0, seconds=0.0, bound=0.0, **fields):
    parsed = tuple(Action(*action.split()[:2]) for action in actions)
    return Plan(parsed, (), "test", peak, seconds, bound, **fields)


def replay(graph, *actions, peak, seconds):
    return check_plan(graph, plan(*actions, peak=peak, seconds=seconds))


def refused(graph, said, *actions, **fields):
    with pytest.raises(PlanError) as caught:
        check_plan(graph, plan(*actions, **fields))
    assert said in str(caught.value), str(caught.value)


def test_the_plain_run():
    found = replay(PLAIN, *RUNS, peak=324, seconds=5.0)
    assert found.live_bytes.tolist() == [110, 210, 214, 314, 324]
    assert (found.peak_action, found.reruns) == (4, 0)


def test_what_somebody_holds_does_not_leave():
    actions = ("run f1", "run f2", "offload h1", "free h1", *RUNS[2:4], "prefetch h1", "run b2")
    replay(LINKED, *actions, peak=324, seconds=9.0)
    outside = [replace(it, held=it.name == "h1") for it in STORAGES]
    refused(Graph(outside, OPS, device=LANES), "referenced outside the step", *actions)


def test_what_is_held_and_cannot_be_made_again_counts_in_the_least_peak():
    graph = Graph(STORAGES, [replace(it, once=True) for it in OPS], device=LANES)
    # At the op b2: x, h1, g2 and g1; on the way the loss could be on the host.
    assert smallest_peak(holes(graph), offload=True) == (220, 4)
    outside = [replace(it, held=it.name in ("loss", "h1")) for it in STORAGES]
    graph = Graph(outside, graph.ops, device=LANES)
    assert smallest_peak(holes(graph), offload=True) == (314, 3)
    with pytest.raises(BudgetError) as refusal:
        plan_graph(graph, 300, techniques=("keep", "offload"))
    assert refusal.value.peak_bytes >= 314


@pytest.mark.parametrize(("said", "fields"), [
    ("peak_bytes: the plan says 300", {"peak": 300}),
    ("seconds: the plan says 4.0", {"seconds": 4.0}), ("lower_bound_seconds", {"bound": 5.1}),
    ("the budget is 320", {"budget_bytes": 320}),
])  # fmt: skip
def test_predictions_are_held_to(said, fields):
    refused(PLAIN, said, *RUNS, **({"peak": 324, "seconds": 5.0} | fields))


SMALL_HOST = Graph(STORAGES, OPS, device=replace(LANES, pinned_bytes=99))
WRITES = Graph(STORAGES, [OPS[0], Op("w", writes=("h1",), seconds=1.0), *OPS[1:]], device=LANES)
NORM = Graph(
    [Storage("x", 1, "input"), Storage("mean", 1, "state"), Storage("y", 1, keep=True)],
    [Op("norm", ("x",), ("y",), ("mean",), seconds=1.0)],
)


@pytest.mark.parametrize(("said", "graph", "actions"), [
    ("no op of this name", PLAIN, ("run f9",)), ("no storage of this name", PLAIN, ("free h9",)),
    ("it is resident", PLAIN, ("free x",)), ("no action has made yet", PLAIN, ("run f2",)),
    ("which action 1 freed", PLAIN, ("run f1", "free h1", "run f2")),
    ("'b2' is never run", PLAIN, RUNS[:-1]),
    ("'loss' must be on the device at the end", PLAIN, (*RUNS, "free loss")),
    ("which action 3 freed", PLAIN, (*RUNS[:3], "free h2", "run b3")),
    ("expected run", PLAIN, ("swap h1",)),
    ("states no transfer speeds", PLAIN, ("run f1", "offload h1")),
    ("no host copy", PLAIN, ("run f1", "prefetch h1")),
    ("device.pinned_bytes", SMALL_HOST, ("run f1", "offload h1")),
    ("prefetch it first", LINKED, ("run f1", "offload h1", "free h1", "run f2")),
    ("host copy", WRITES, ("run f1", "offload h1", "run w")),
    ("it has had 1", NORM, ("run norm", "free y", "run norm")),  # a state is changed once
    *(
        ("may not run twice", first_op(**{flag: True}), ("run f1", "run f1"))
        for flag in ("effect", "collective", "once", "random")
    ),
])  # fmt: skip
def test_the_first_violation_is_named(said, graph, actions):
    refused(graph, said, *actions)


def test_lanes_run_beside_the_ops():
    #   ops        f1 f2 f3 b3 ..b2         h1 leaves at 1.0 and is gone at 3.5 (0.5 + 100 / 50),
    #   to host       h1hhhh                so its free waits until then; back takes 0.5 + 100 / 100
    #   to device            h1hh
    actions = ("run f1", "offload h1", "run f2", "run f3", "free h1", "prefetch h1", "run b3")
    found = replay(LINKED, *actions, "run b2", peak=324, seconds=6.0)
    assert found.start_s.tolist() == [0, 1, 1, 2, 3.5, 3.5, 3.5, 5.0]
    assert found.end_s.tolist() == [1, 3.5, 2, 3, 3.5, 5.0, 4.5, 6.0]
    assert found.host_peak_bytes == 100


def test_versions_of_what_is_changed_in_place():
    storages = [Storage("x", 1, "input"), Storage("h", 10), Storage("y", 1), Storage("z", 1)]
    ops = [
        Op("make", ("x",), ("h",), seconds=1.0),
        Op("first", ("h",), ("y",), seconds=1.0),
        Op("change", writes=("h",), seconds=1.0),
        Op("second", ("h",), ("z",), seconds=1.0),
    ]
    graph = Graph(storages, ops)
    rebuilt = ("run make", "run first", "run change", "free h", "run make", "run change")
    assert replay(graph, *rebuilt, "run second", peak=13, seconds=6.0).reruns == 2
    refused(graph, "after 1 in-place writes; it has had 0", *rebuilt[:-1], "run second")
    refused(graph, "after 0 in-place writes; it has had 1", *rebuilt[:3], "run first")


def test_replayable_random_ops_run_twice():
    graph = first_op(random=True, replayable=True)
    found = replay(graph, "run f1", *RUNS, peak=324, seconds=6.0)
    # The second h1 is made beside the first, for the time of the run.
    assert found.live_bytes.tolist()[:2] == [110, 210]


def test_order_of_what_keeps_its_order():
    effect = Op("a", ("x",), seconds=1.0, effect=True)
    plain = Op("b", ("x",), seconds=1.0)
    collective = Op("c", ("x",), seconds=1.0, collective=True)
    storages = [Storage("x", 1, "input")]
    graph = Graph(storages, [effect, plain, collective])
    replay(graph, "run b", "run a", "run c", peak=1, seconds=3.0)
    refused(graph, "keep the order", "run c", "run a", "run b")
    ops = [replace(plain, name="z"), replace(effect, fixed=True), plain, collective]
    fixed = Graph(storages, ops)
    refused(fixed, "moved past it", "run a", "run z", "run b", "run c")
    refused(fixed, "moved past it", "run z", "run b", "run a", "run c")
    replay(fixed, "run z", "run a", "run c", "run b", peak=1, seconds=4.0)


def test_ways_and_workspaces():
    graph = first_op(workspaces=(Workspace(7, 3.0), Workspace(0, 9.0)))
    assert replay(graph, *RUNS, peak=324, seconds=7.0).live_bytes[0] == 117
    slow = plan(*RUNS, peak=324, seconds=13.0)
    slow = replace(slow, actions=(Action("run", "f1", 1), *slow.actions[1:]))
    assert check_plan(graph, slow).live_bytes[0] == 110
    with pytest.raises(PlanError, match="got way 2; the op has 2 ways"):
        check_plan(graph, replace(slow, actions=(Action("run", "f1", 2),)))


def test_plans_are_read_as_they_were_written(tmp_path):
    made = policy("superneurons_memory")(training_chain(4), budget_bytes=None)
    made = replace(made, budget_bytes=10**6)
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    assert made.decided("recompute") == ("a0", "a1", "a2")


@pytest.mark.parametrize(("old", "new", "said"), [
    ('"format": "sn_memory.plan.v1"', '"format": "v9"', "plan.format"),
    ('"peak_bytes": 324', '"peak_bytes": "324"', "plan.peak_bytes"),
    ('"peak_bytes": 324', '"peak_bytes": -1', "plan.peak_bytes"),
    ('["run", "f2"]', '["fly", "f2"]', "actions[1][0]"), ('["run", "f2"]', '["run"]', "actions[1]"),
    ('["run", "f2"]', '["run", "f2", -1]', "actions[1][2]"),
    ('"technique": "keep"', '"technique": "lose"', "decisions[0].technique"),
    ('"planner": "test",', "", "the key 'planner' is missing"),
    ('"actions": [', '"steps": [', "plan: the key 'actions' is missing"),
    ('"technique": "keep"', '"action": "keep"', "decisions[0]: the key 'technique' is missing"),
    ('"planner"', "planner", "line 4"),
])  # fmt: skip
def test_malformed_plans_name_the_key_or_line(old, new, said):
    good = replace(plan(*RUNS, peak=324, seconds=5.0), decisions=(Decision("h1", "keep"),))
    text = good.to_json()
    assert old in text
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text.replace(old, new, 1))
    assert said in str(caught.value)
