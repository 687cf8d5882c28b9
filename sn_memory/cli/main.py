"""The command line: graphs and plans as files, planned, checked and shown.

python -m sn_memory plan graph.json --budget 4GiB -o plan.json
python -m sn_memory check graph.json plan.json
python -m sn_memory report graph.json plan.json -o report.html
python -m sn_memory pack buffers.csv --capacity 1MiB -o offsets.csv
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from ..base.errors import CapacityError, GraphError, MissingExtra, PlanError
from ..base.sizes import show_bytes
from ..check.replay import check_plan
from ..graph.graph import Graph
from ..plan.api import TECHNIQUES, plan_graph
from ..plan.plan import BudgetError, Plan
from .pack import add_pack
from .report import add_report

_EXPECTED = (GraphError, PlanError, BudgetError, CapacityError, MissingExtra, OSError, ValueError)


def main(arguments: Sequence[str]) -> int:
    """Run one command; return 0, or 1 after an error that is about the files or the budget."""
    options = _parser().parse_args(arguments)
    try:
        text: str = options.command(options)
    except _EXPECTED as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sn_memory", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="plan|check|report|pack")
    plan = commands.add_parser("plan", help="plan a graph within a budget")
    plan.add_argument("graph", help="graph file (docs/graph_format.md)")
    plan.add_argument("--budget", required=True, help='bytes, "4GiB", or "60%%" of the own peak')
    plan.add_argument("-o", "--output", help="where the plan goes; without it only a summary")
    plan.add_argument("--planner", default="auto", help="auto, or a historical planner")
    plan.add_argument("--techniques", default=",".join(TECHNIQUES), help="what auto may do")
    plan.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    plan.add_argument("--deterministic", action="store_true", help="count work in place of seconds")
    plan.add_argument("--quiet", action="store_true", help="no progress on standard error")
    plan.set_defaults(command=_plan)
    check = commands.add_parser("check", help="replay a plan")
    check.add_argument("graph")
    check.add_argument("plan")
    check.set_defaults(command=_check)
    add_report(commands)
    add_pack(commands)
    return parser


def _plan(options: argparse.Namespace) -> str:
    graph = Graph.from_json(options.graph)
    plan = plan_graph(
        graph,
        options.budget,
        planner=options.planner,
        techniques=[technique.strip() for technique in options.techniques.split(",")],
        time_limit_s=options.time_limit,
        deterministic=options.deterministic,
        progress=not options.quiet,
    )
    if options.output is not None:
        plan.to_json(options.output)
    return summary(plan)


def summary(plan: Plan) -> str:
    """Return what a plan does, in a few lines."""
    counts = Counter(decision.technique for decision in plan.decisions)
    done = ", ".join(f"{count} {technique}" for technique, count in sorted(counts.items()))
    sources = ", ".join(f"{count} {source}" for source, count in plan.seconds_sources.items())
    return "\n".join(
        (
            f"planner   {plan.planner}, {plan.solve_s:.2f} s",
            f"peak      {show_bytes(plan.baseline_peak_bytes)} -> {show_bytes(plan.peak_bytes)}",
            f"seconds   {plan.baseline_seconds:.6g} -> {plan.seconds:.6g} ({plan.overhead:+.2%})",
            f"bound     {plan.lower_bound_seconds:.6g}, gap {plan.gap:.2%}",
            f"storages  {done}",
            f"times     {sources}",
        )
    )


def _check(options: argparse.Namespace) -> str:
    graph, plan = Graph.from_json(options.graph), Plan.from_json(options.plan)
    replay = check_plan(graph, plan)
    return (
        f"ok: {len(plan.actions)} actions, peak {show_bytes(replay.peak_bytes)} "
        f"({replay.peak_bytes} bytes) at action {replay.peak_action}, {replay.seconds:.6g} s, "
        f"{replay.reruns} reruns, {show_bytes(replay.host_peak_bytes)} on the host"
    )
