"""Numbers and files that are too much: documented errors, in every reader, and nothing wraps."""

import json
import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from random_graphs import budget_of, random_graph, training_chain

from sn_cli.main import main
from sn_memory import (
    Action,
    BudgetError,
    Device,
    Graph,
    GraphError,
    Op,
    PackError,
    Plan,
    PlanError,
    Storage,
    Workspace,
    check_plan,
    pack,
    plan_graph,
)
from sn_memory.base.sizes import is_part, parse_bytes
from sn_memory.check import check_packing
from sn_memory.graph.liveness import peak
from sn_memory.plan.policies import policy
from sn_memory.pool.pack import arrange
from sn_memory.pool.problem import read_csv

MOST = 2**62
COLUMNS = "id,lower,upper,size\n"
UNKNOWN = Device()


def chain(*sizes, seconds=1.0, device=UNKNOWN, allocator="none"):
    """One op for each size, each reading what the one before made."""
    storages = [Storage(f"s{at}", size) for at, size in enumerate(sizes)]
    storages[-1] = replace(storages[-1], keep=True)
    ops = [
        Op(f"o{at}", (f"s{at - 1}",) if at else (), (f"s{at}",), seconds=seconds)
        for at in range(len(sizes))
    ]
    return Graph(storages, ops, device=device, allocator=allocator)


def one_op(storage=None, device=UNKNOWN, **fields):
    return Graph([storage or Storage("y", 4)], [Op("f", (), ("y",), **fields)], device=device)


SUM_OF_BYTES, SUM_OF_SECONDS = r"2\*\*62", r"together take .* expected 2\*\*62 at most"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: chain(*[2**63 - 1] * 4), SUM_OF_BYTES),
        (lambda: chain(2**61, 2**61), SUM_OF_BYTES),
        (lambda: chain(MOST), SUM_OF_BYTES),
        # It is the rounded sizes that are added up.
        (lambda: chain(*[MOST // 8 - 1] * 8, allocator="torch"), SUM_OF_BYTES),
        (lambda: one_op(workspaces=(Workspace(2**61), Workspace(2**61))), SUM_OF_BYTES),
        (lambda: chain(4, 4, seconds=1e308), SUM_OF_SECONDS),
        (lambda: chain(4, 4, seconds=3e18), SUM_OF_SECONDS),
        (lambda: chain(4, device=Device("", None, None, 5e-324, 1.0)), SUM_OF_SECONDS),
        (lambda: chain(4, 4, seconds=None, device=Device("", 1.0, 1e-320)), SUM_OF_SECONDS),
        (lambda: chain(4, 4, device=Device(transfer_latency_s=1e308)), SUM_OF_SECONDS),
        # Graphs made in Python are read as strictly as files.
        (lambda: one_op(Storage("y", 1.5)), "expected"),
        (lambda: one_op(Storage("y", True)), "expected"),
        (lambda: one_op(Storage("y", math.nan)), "expected"),
        (lambda: one_op(seconds=math.nan), "expected"),
        (lambda: one_op(seconds=10**400), "expected"),
        (lambda: one_op(seconds="1"), "expected"),
        (lambda: one_op(traffic_bytes=2**70), "expected"),
        (lambda: one_op(flops=math.inf), "expected"),
        (lambda: one_op(device=Device(flops_per_s=10**400)), "expected"),
        (lambda: one_op(device=Device(pinned_bytes=2**70)), "expected"),
        (lambda: one_op(device=Device(to_host_bytes_per_s=math.nan)), "expected"),
    ],
)
def test_sums_that_do_not_fit_and_what_is_no_number_are_refused(build, said):
    with pytest.raises(GraphError, match=said):
        build()


def test_numbers_of_numpy_are_numbers():
    graph = one_op(Storage("y", np.int64(4)), seconds=np.float32(0.5))
    assert graph.arrays.seconds == [(0.5,)]


def test_what_just_fits_is_planned_and_checked_without_wrapping():
    size = (MOST - 1) // 6
    graph = chain(*[size] * 6)
    assert peak(graph).bytes == 6 * size - 4 * size
    plan = plan_graph(graph, "100%", time_limit_s=1)
    assert check_plan(graph, plan).peak_bytes == 2 * size
    # One op that makes all, run twice: twice the sum is live.
    storages = [Storage(f"s{at}", size, keep=True) for at in range(6)]
    both = Graph(storages, [Op("f", (), tuple(it.name for it in storages), seconds=1.0)])
    actions = (Action("run", "f"), Action("run", "f"))
    twice = Plan(actions, (), "by hand", 12 * size, 2.0, 1.0)
    assert check_plan(both, twice).peak_bytes == 12 * size > 2**62
    with pytest.raises(BudgetError):
        plan_graph(both, 5 * size, time_limit_s=1)


def test_plans_of_sizes_near_the_limit_keep_their_budgets():
    planned = 0
    for seed in range(6):
        small = random_graph(seed, most_ops=25, plain=seed % 2 == 0)
        scale = (MOST - 1) // sum(it.bytes for it in small.storages) // 8
        storages = [replace(it, bytes=it.bytes * scale) for it in small.storages]
        device = replace(small.device, pinned_bytes=None)
        graph = Graph(storages, small.ops, device=device)
        budget = budget_of(graph, 0.85)
        with suppress(BudgetError):
            plan = plan_graph(graph, budget, time_limit_s=0.3, deterministic=True)
            planned += 1
            assert check_plan(graph, plan).peak_bytes <= budget
    assert planned


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e308])
@pytest.mark.parametrize("field", ["seconds", "lower_bound_seconds"])
def test_predictions_that_are_no_numbers_are_refused(field, wrong):
    graph = training_chain(3)
    plan = policy("liveness")(graph, budget_bytes=None)
    with pytest.raises(PlanError, match=field):
        check_plan(graph, replace(plan, **{field: wrong}))


HEAD = '{"format": "sn_memory.graph.v1", "storages": [{"name": "y", "bytes": 4%s}], "ops": []}'
DEVICE = HEAD.replace('"ops"', '"device": {"flops_per_s": %s}, "ops"').replace("%s", "", 1)
BAD_TEXTS = {
    "deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "just as deep as it can be read": HEAD % (', "keep": ' + "[" * 900 + "]" * 900),
    "huge integer": HEAD % ("0" * 5000),
    "large integer": HEAD % ("0" * 30),
    "huge exponent": DEVICE % "1e999",
    "large number as integer": DEVICE % ("1" + "0" * 400),
    "key twice": HEAD % ', "name": "z"',
    "half a character": HEAD % ', "role": "\\ud800"',
    "name of half a character": HEAD.replace('"y"', '"\\udfff"') % "",
    "nan": DEVICE % "NaN",
    "cut": HEAD[:40],
    "nul": HEAD.replace("4", "\0") % "",
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_graph_and_plan_texts_are_documented_errors(name, tmp_path, capsys):
    text = BAD_TEXTS[name]
    with pytest.raises(GraphError) as caught:
        Graph.from_json(text)
    assert len(str(caught.value)) < 400
    with pytest.raises(PlanError):
        Plan.from_json(text)
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main(["memory", "check", str(path), str(path)]) == 2
    assert capsys.readouterr().err.startswith("sn: ")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("peak_bytes", 2**63, "plan.peak_bytes"),
        ("budget_bytes", -(2**63), "plan.budget_bytes"),
        ("solve_s", 10**400, "plan.solve_s"),
        ("seconds_sources", {"measured": 2**80}, "plan.seconds_sources.measured"),
        ("actions", [["run", "\ud800"]], "actions[0]"),
        ("actions", [["run", "f", [[]]]], "actions[0][2]"),
    ],
)
def test_plans_name_the_key_of_what_is_too_much(key, value, said):
    plan = json.loads(policy("liveness")(training_chain(3), budget_bytes=None).to_json())
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps({**plan, key: value}))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("read", "error"),
    [(Graph.from_json, GraphError), (Plan.from_json, PlanError), (read_csv, PackError)],
)
def test_files_that_are_no_text_and_paths_that_are_none(read, error, tmp_path):
    path = tmp_path / "noise"
    path.write_bytes(b'{"format": \xff\xfe}')
    with pytest.raises(error, match="UTF-8"):
        read(path)
    for odd in ("a\0b", "\ud800\0"):
        with pytest.raises(error):
            read(odd)
    with pytest.raises(OSError, match="No such file"):
        read(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: got columns none"),
        ("id,lower,upper\n", "line 1"),
        ("id,lower,upper,size,colour\n", "line 1"),
        (COLUMNS + "0,1,2,3\n1,2,3\n", "line 3: got 3 fields"),
        (COLUMNS + "0,1,2,many\n", "line 2: got 0,1,2,many"),
        (COLUMNS + "a,0,1,4\na,1,2,4\n", "line 3: the id .a. is used twice, first in line 2"),
        (COLUMNS + "a,0,1,%s\n" % ("9" * 5000), "line 2: got a,0,1,999"),
        (COLUMNS + '"%s",0,1,4\n' % ("x" * 200_000), "field larger"),
        (COLUMNS + "a,0,1,\0\n", "line 2"),
    ],
)
def test_bad_tables_are_pack_errors(tmp_path, capsys, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(PackError, match=message) as caught:
        read_csv(path)
    assert len(str(caught.value)) < 400
    assert main(["memory", "pack", str(path)]) == 2
    assert capsys.readouterr().err.startswith("sn: ")


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 2**63, 1)],
        [(2**63, 2**63 + 5, 1)],
        [(0, 1, 2**63)],
        [(0, 1, 10**30)],
        [(-(2**63), 2**63 - 1, 1)],
        [(-(2**62) - 1, 0, 1)],
        [(0, 1, 1, 2**62), (0, 1, 1, 2**62)],
        [(0, 1, [1])],
        [(0, 1, {}), (0, 1, 1)],
        [(0, 1, "1")],
        [None],
        np.array([[0, 2**63, 1]], np.uint64),
        np.array([[0.0, 1.0, 1.0]]),
    ],
    ids=str,
)
def test_rows_beyond_64_bits_are_pack_errors(rows):
    with pytest.raises(PackError):
        pack(rows)


def test_rows_at_the_limits_are_packed():
    rows = [(-(2**62), 2**62, 2**61 - 5), (2**62 - 1, 2**62, 2**61, 4), (0, 1, 0)]
    packing = arrange(rows, time_limit_s=1)
    assert check_packing(rows, packing.offsets) == packing.height < 2**62
    assert pack(rows, capacity=2**70) == list(packing.offsets)


@pytest.mark.parametrize("row", [(1, 1, 4), (0, 1, -4), (0, 1, 4, 0)])
def test_the_judge_of_packings_refuses_senseless_rows(row):
    with pytest.raises(PackError, match="buffer 0"):
        check_packing([row], [0])


@pytest.mark.parametrize("size", ["9" * 400, "1e9", "9" * 5000, "99999999 TiB", 2**63, "\ud800",
                                  "much", -1, "5 XB"])  # fmt: skip
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match="got size"):
        parse_bytes(size)
    with pytest.raises(ValueError, match="got size"):
        plan_graph(training_chain(3), size)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("6G", 6 * 2**30), ("6 g", 6 * 2**30), ("1.5M", 3 * 2**19), ("2T", 2**41),
        ("6GB", 6 * 10**9), (0.6, 600), ("0.6", 600), (".5", 500), ("60%", 600), (1.0, 1000),
        ("1.0", 1000),
        (6e9, 6 * 10**9), (2.0, 2), (1, 1), ("1", 1), (np.float64(0.6), 600),
        # Whole bytes are exact.
        (str(2**62 + 1), 2**62 + 1), (f"{2**53 + 1} B", 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(size, expected):
    assert parse_bytes(size, whole=1000) == expected


@pytest.mark.parametrize("size", [0.0, -0.5, "1.5", 1.5, "0.0", float("nan"), float("inf"), True])
def test_what_is_neither_bytes_nor_a_part_is_refused(size):
    with pytest.raises(ValueError, match="or a part as"):
        parse_bytes(size, whole=1000)


@pytest.mark.parametrize("size", [0.6, "0.6", "60%"])
def test_a_part_of_nothing_is_refused(size):
    assert is_part(size)
    with pytest.raises(ValueError, match="expected bytes or text"):
        parse_bytes(size)
