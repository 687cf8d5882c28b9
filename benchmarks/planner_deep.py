"""How deep a ResNet fits: batch 16 in 12 GiB, and ResNet-2500 at batch 1 and 16.

    python -m benchmarks planner_deep [--quick] [--json FILE] [--time-limit SECONDS] [--low BLOCKS]
                                      [--part deepest | resnet2500] [--update end | early]

Depths follow SuperNeurons' rule (graphs/residual.py). Weights, their gradients and one image batch
count as memory; the optimizer is plain SGD, so it has no state of its own. Two updates are shown:
at the end of the step, when all gradients of weights live at once, and early, layer by layer.
Seconds are predicted for a K40-like device, as in the paper; `solve_s` is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from graphs import K40_LIKE, deep_stages, resnet
from machine import origin
from rows_file import flags, save

from sn_memory import BudgetError, Graph, Plan, check_plan, plan_graph
from sn_memory.graph.liveness import baseline_seconds, peak

BUDGET = 12 << 30
BATCH = 16
# Blocks of the third stage, of three layers each: the planned depth is known to so many of them.
_GRAIN = 32


def build(depth: int, batch: int, *, early: bool) -> Graph:
    """The training graph of a deep ResNet."""
    net = resnet(batch, depth, stages=deep_stages(depth), early_update=early, device=K40_LIKE)
    return net.graph()


def depth_of(third: int) -> int:
    """Depth by the rule, for so many blocks in the third stage."""
    return 3 * (44 + third) + 2


def row(
    planner: str, depth: int, batch: int, early: bool, graph: Graph, plan: Plan | None, s: float
) -> dict[str, Any]:
    """One row of the file."""
    replay = check_plan(graph, plan) if plan else None
    held = all_bytes(graph) if planner == "keep_all" else peak(graph).bytes
    seconds = baseline_seconds(graph)
    result = {
        "model": f"resnet{depth}",
        "framework": "generated",
        "planner": planner,
        "batch": batch,
        "depth": depth,
        "ops": len(graph.ops),
        "fits": (plan.peak_bytes if plan else held) <= BUDGET,
        "early_update": early,
        "budget_bytes": BUDGET,
        "predicted_peak_bytes": plan.peak_bytes if plan else held,
        "measured_peak_bytes": None,
        "predicted_s": plan.seconds if plan else seconds,
        "measured_s": None,
        "baseline_s": seconds,
        "baseline_peak_bytes": peak(graph).bytes,
        "base_bytes": graph.base_bytes,
        "gap": plan.gap if plan else None,
        "solve_s": s,
        "reruns": replay.reruns if replay else 0,
        "host_peak_bytes": replay.host_peak_bytes if replay else 0,
        "device": graph.device.name,
    }
    sizes = [result[key] / 2**30 for key in ("predicted_peak_bytes", "baseline_peak_bytes")]
    what = f"{planner:>10} depth {depth:5} batch {batch:3} update {'early' if early else 'end':5}"
    slow = result["predicted_s"] / seconds - 1
    print(
        f"{what} {sizes[0]:6.2f} of {sizes[1]:6.2f} GiB, {slow:+.1%}, planned in {s / 60:.1f} min"
    )
    return result


def all_bytes(graph: Graph) -> int:
    """Every storage at once, as if nothing were ever freed within the step."""
    return int(graph.arrays.bytes.sum())


def deepest_unplanned(name: str, size: Callable[[Graph], int], early: bool) -> dict[str, Any]:
    """The deepest net whose memory, by `size`, fits; the shallowest of the rule if none does."""
    low, high = 1, 4096
    while high - low > 1:
        middle = (low + high) // 2
        graph = build(depth_of(middle), BATCH, early=early)
        low, high = (middle, high) if size(graph) <= BUDGET else (low, middle)
    graph = build(depth_of(low), BATCH, early=early)
    return row(name, depth_of(low), BATCH, early, graph, None, 0.0)


def deepest_planned(
    early: bool, time_limit_s: float, low: int, high: int, note: Callable[[dict[str, Any]], None]
) -> None:
    """Note every depth for which `auto` finds a plan, bisecting between two numbers of blocks."""
    while high - low > _GRAIN:
        middle = (low + high) // 2
        graph = build(depth_of(middle), BATCH, early=early)
        began = time.perf_counter()
        try:
            plan = plan_graph(graph, BUDGET, time_limit_s=time_limit_s)
        except BudgetError as refusal:
            print(f"        auto depth {depth_of(middle):5}: {refusal}", flush=True)
            high = middle
            continue
        spent = time.perf_counter() - began
        note(row("auto", depth_of(middle), BATCH, early, graph, plan, spent))
        low = middle


def most_blocks(early: bool) -> int:
    """Blocks at which what is resident fills the budget by itself: a bound for the bisection."""
    one, two = (build(depth_of(n), 1, early=early).base_bytes for n in (1, 2))
    held = 1 if early else 2  # with the update at the end, gradients take as much as weights
    return (BUDGET - held * one) // (held * (two - one)) + 2


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="only what is planned quickly")
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--low", type=int, help="stage-three blocks to start bisecting from")
    parser.add_argument("--update", action="append", choices=("end", "early"))
    parser.add_argument("--part", action="append", choices=("deepest", "resnet2500"))
    args = parser.parse_args(argv)
    parts = args.part or ["deepest", "resnet2500"]
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row | origin())
        save(args.json, rows)

    if "resnet2500" in parts:
        for batch in (1,) if args.quick else (1, 16):
            graph = build(2500, batch, early=False)
            began = time.perf_counter()
            plan = plan_graph(graph, BUDGET, time_limit_s=args.time_limit)
            note(row("auto", 2501, batch, False, graph, plan, time.perf_counter() - began))
    if "deepest" in parts:
        for update in args.update or ("end", "early"):
            early = update == "early"
            note(deepest_unplanned("keep_all", all_bytes, early))
            kept = deepest_unplanned("liveness", lambda graph: peak(graph).bytes, early)
            note(kept)
            if not args.quick:
                low = (kept["depth"] - 2) // 3 - 44 if args.low is None else args.low
                deepest_planned(early, args.time_limit, low, most_blocks(early), note)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
