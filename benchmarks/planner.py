"""Time against memory: `auto` and the planners of the literature on the generated networks.

    python -m benchmarks planner [--quick] [--json FILE] [--png FILE] [--models NAME ...]
                                 [--budgets N] [--time-limit SECONDS]
    python -m benchmarks planner --framework torch|tensorflow [...]    planner_torch.py and so on

For every network the smallest feasible budget is searched first, then all planners plan at the
same budgets from the unplanned peak down to it, and at a half and a third of what is not resident.
Seconds come from the roofline of a stated device (graphs/device.py): nothing is measured here but
the planning itself (`solve_s`), so the measured columns are empty. Every plan is replayed by
`check_plan`. The planners of the literature are those of the package and of `rivals`; one that
cannot keep a budget gives a row with `kept` false and the peak it needs. `auto_recompute` is `auto`
without transfers, at the half and the third.

An existing file is resumed: networks in it are skipped, unless `--models` names them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from graphs import (
    Net,
    alexnet,
    cifar_resnet,
    densenet121,
    inception_v4,
    layered,
    layers_for_ops,
    resnet,
    transformer,
    unet,
    vgg16,
)
from machine import origin
from rivals.planners import PLANNERS
from rows_file import flags, load, save
from tables import columns

from sn_memory import BudgetError, Graph, Plan, check_plan, plan_front, plan_graph
from sn_memory.graph.liveness import baseline_seconds, peak
from sn_memory.plan.plan import TECHNIQUES

# What frameworks call, with gradients in buffers: see graphs/net.py and docs/planner.md.
SETTINGS: dict[str, Any] = {"granularity": "call", "gradients": "buffers", "inplace_relu": True}
# Batches that fill a good part of a 16 GB card without a plan; cheap ones first.
NETWORKS: dict[str, Callable[[], Net]] = {
    "alexnet": lambda: alexnet(512, **SETTINGS),
    "vgg16": lambda: vgg16(64, **SETTINGS),
    "unet": lambda: unet(8, **SETTINGS),
    "layered100": lambda: layered(100, seed=1),
    "resnet50": lambda: resnet(64, 50, **SETTINGS),
    "transformer12": lambda: transformer(4, 12, **SETTINGS),
    "inception_v4": lambda: inception_v4(32, **SETTINGS),
    "resnet152": lambda: resnet(32, 152, **SETTINGS),
    "densenet121": lambda: densenet121(64, **SETTINGS),
    "transformer_2500_ops": lambda: transformer(1, layers_for_ops(2500), **SETTINGS),
    "resnet1202": lambda: cifar_resnet(64, 1202, **SETTINGS),
}
QUICK = ("alexnet", "vgg16", "resnet50", "unet")
RECOMPUTE = ("keep", "recompute")


def smallest(graph: Graph, time_limit_s: float) -> Plan:
    """The plan of least peak that was found by anyone."""
    plans = [planner(graph, budget_bytes=None) for planner in PLANNERS.values()]
    try:
        plan_graph(graph, graph.base_bytes, time_limit_s=time_limit_s)
    except BudgetError as refusal:
        plans += [refusal.plan] if refusal.plan else []
    return min(plans, key=lambda plan: (plan.peak_bytes, plan.seconds))


def front(
    graph: Graph, budgets: list[int], least: Plan, time_limit_s: float, techniques: Sequence[str]
) -> list[Plan]:
    """What `auto` answers at each budget, the smallest last; `least` where it finds nothing."""
    for count in range(len(budgets), 0, -1):
        try:
            plans = plan_front(
                graph, budgets[:count], techniques=techniques, time_limit_s=time_limit_s
            )
        except BudgetError:
            continue
        return [*plans, *(replace(least, budget_bytes=size) for size in budgets[count:])]
    raise AssertionError("the unplanned peak is a budget that everyone keeps")


def plans(
    graph: Graph, budgets: list[int], fixed: list[int], least: Plan, time_limit_s: float
) -> Iterator[tuple[str, int, Plan, float]]:
    """Planner, budget, plan and seconds of planning; rebuilds alone at some budgets only."""
    for plan in front(graph, budgets, least, time_limit_s, TECHNIQUES):
        assert plan.budget_bytes is not None
        yield "auto", plan.budget_bytes, plan, plan.solve_s
    for budget in fixed:
        try:
            plan = plan_graph(graph, budget, techniques=RECOMPUTE, time_limit_s=time_limit_s)
        except BudgetError:
            continue
        yield "auto_recompute", budget, plan, plan.solve_s
    for name, planner in PLANNERS.items():
        for budget in budgets:
            began = time.thread_time()
            plan = planner(graph, budget_bytes=budget)
            yield name, budget, plan, time.thread_time() - began


def measure(model: str, net: Net, count: int, time_limit_s: float) -> list[dict[str, Any]]:
    """All rows of one network."""
    graph = net.graph()
    top, base = peak(graph).bytes, graph.base_bytes
    least = smallest(graph, time_limit_s)
    span = top - least.peak_bytes
    even = {top - span * at // (count - 1) for at in range(count)}
    # A half and a third of the memory are what people compare by.
    fixed = [base + (top - base) // part for part in (2, 3)]
    fixed = [size for size in fixed if size > least.peak_bytes]
    budgets = sorted(even | set(fixed), reverse=True)
    rows = []
    for name, budget, plan, solve_s in plans(graph, budgets, fixed, least, time_limit_s):
        kept = plan.peak_bytes <= budget
        if not kept or name == "liveness":
            plan = replace(plan, budget_bytes=None)
        replay = check_plan(graph, plan)
        rows.append(
            {
                "model": model,
                "framework": "generated",
                "planner": name,
                "batch": net.batch,
                "granularity": net.granularity,
                "gradients": net.gradients,
                "ops": len(graph.ops),
                "budget_bytes": budget,
                "kept": kept,
                "predicted_peak_bytes": plan.peak_bytes,
                "measured_peak_bytes": None,
                "predicted_s": plan.seconds,
                "measured_s": None,
                "baseline_s": baseline_seconds(graph),
                "baseline_peak_bytes": top,
                "base_bytes": base,
                "lower_bound_s": plan.lower_bound_seconds,
                "gap": plan.gap,
                "solve_s": solve_s,
                "time_limit_s": time_limit_s,
                "reruns": replay.reruns,
                "host_peak_bytes": replay.host_peak_bytes,
                "found_by": plan.planner,
                "device": graph.device.name,
            }
        )
    return rows


def slower_than_named(rows: list[dict[str, Any]]) -> list[str]:
    """Where `auto` lost against another planner at the same budget; should be empty."""
    auto = {(r["model"], r["budget_bytes"]): r for r in rows if r["planner"] == "auto"}
    return [
        f"{r['model']} {r['planner']} at {r['budget_bytes']}"
        for r in rows
        if r["kept"]
        and r["planner"] != "auto_recompute"
        and r["predicted_s"] < auto[r["model"], r["budget_bytes"]]["predicted_s"] * (1 - 1e-9)
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the extra time of each planner at each budget of a network."""
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        first = mine[0]
        span = first["baseline_peak_bytes"] - first["base_bytes"]
        budgets = list(dict.fromkeys(r["budget_bytes"] for r in mine))
        sizes = f"{span / 2**30:.2f} GiB beside {first['base_bytes'] / 2**30:.2f} GiB resident"
        print(f"\n{model}: {first['ops']} ops, batch {first['batch']}, {sizes}")
        shares = [f"{(b - first['base_bytes']) / span:.0%}" for b in budgets]
        lines = []
        for planner in dict.fromkeys(r["planner"] for r in mine):
            own = {r["budget_bytes"]: r for r in mine if r["planner"] == planner and r["kept"]}
            cells = [
                f"{own[b]['predicted_s'] / own[b]['baseline_s'] - 1:+.1%}" if b in own else "-"
                for b in budgets
            ]
            lines.append([planner, *cells])
        gaps = [f"{r['gap']:.1%}" for r in mine if r["planner"] == "auto"]
        print(columns(["budget", *shares], [*lines, ["gap of auto", *gaps]]), flush=True)


def main(argv: list[str]) -> int:
    """Run, print, write; 1 if `auto` lost anywhere."""
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument("--framework", choices=["generated", "torch", "tensorflow"])
    chosen, argv = choice.parse_known_args(argv)
    if chosen.framework in ("torch", "tensorflow"):
        return int(import_module(f"planner_{chosen.framework}").main(argv))
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="four networks at four budgets")
    parser.add_argument("--models", nargs="+", choices=list(NETWORKS), help="only these networks")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds of auto per budget")
    parser.add_argument("--png", type=Path)
    args = parser.parse_args(argv)
    count, limit = (4, 4.0) if args.quick else (args.budgets, args.time_limit)
    state = origin()
    # Networks that were not named, and are there, are done.
    kept = [] if args.quick else load(args.json)
    rows = [row for row in kept if row["model"] not in (args.models or ())]
    wanted = list(args.models or (QUICK if args.quick else NETWORKS))
    wanted = [model for model in wanted if model not in {row["model"] for row in rows}]
    for model in wanted:
        measured = [{**row, **state} for row in measure(model, NETWORKS[model](), count, limit)]
        show(measured)
        rows = sorted([*rows, *measured], key=lambda row: list(NETWORKS).index(row["model"]))
        save(args.json, rows)
    if args.png:
        from planner_report import fronts

        fronts(rows, args.png)
    lost = slower_than_named(rows)
    print("\nslower than a named planner at the same budget:", lost or "never")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
