"""The command `report`: prints tables, and writes a page and a picture."""

from __future__ import annotations

import argparse
from typing import Any

from sn_memory import Graph, Plan, PlanError
from sn_memory.base.progress import progress_output, report_progress
from sn_memory.plan import policies
from sn_memory.report.report import Report, report

from ..command import Answer, add_command, page_file, picture_file
from .graphs import GRAPH_HELP, read_graph


def add_report(commands: Any) -> None:
    """Add the command to its group."""
    parser = add_command(commands, "report", _report, help="tables and pictures of a plan")
    parser.add_argument("graph", help=GRAPH_HELP)
    parser.add_argument("plan", help="plan file")
    parser.add_argument(
        "-o", "--output", type=page_file, help="HTML page to write; it embeds the picture"
    )
    parser.add_argument("--png", type=picture_file, help="picture to write")
    parser.add_argument(
        "--against",
        default="all",
        help="planners to compare with, for the same budget: names with commas, all (default), or "
        "none",
    )
    parser.add_argument("--rows", type=int, default=40, help="decisions to print (default 40)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _report(options: argparse.Namespace) -> Answer:
    names = _names(options.against)
    graph, plan = read_graph(options.graph), Plan.from_json(options.plan)
    with progress_output(not options.quiet):
        others = _planned(graph, plan, names)
    try:
        plan_report = report(graph, plan, others=others)
    except PlanError as wrong:
        return Answer(f"no: {wrong}", {"why": str(wrong)}, yes=False)
    if options.output is not None:
        plan_report.write_html(options.output)
    if options.png is not None:
        plan_report.write_png(options.png)
    return Answer(plan_report.text(rows=options.rows).rstrip("\n"), _data(plan_report))


def _planned(graph: Graph, plan: Plan, names: list[str]) -> list[Plan]:
    others = []
    for number, name in enumerate(names):
        report_progress("planners", number, len(names), name)
        others.append(policies.policy(name)(graph, budget_bytes=plan.budget_bytes))
    return others


def _data(plan_report: Report) -> dict[str, Any]:
    def row(plan: Plan) -> dict[str, Any]:
        return {
            "planner": plan.planner,
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": plan.peak_bytes,
            "seconds": plan.seconds,
            "overhead": plan.overhead,
        }

    return {
        "graph": plan_report.graph.name,
        "before": {
            "peak_bytes": plan_report.before.peak_bytes,
            "peak_at": plan_report.before.peak_at,
        },
        "after": {"peak_bytes": plan_report.after.peak_bytes, "peak_at": plan_report.after.peak_at},
        "layers": [{"name": name, "bytes": size} for name, size in plan_report.after.peak_layers],
        "owners": [{"name": name, "bytes": size} for name, size in plan_report.after.owners],
        "reserved_peak_bytes": plan_report.plan.reserved_peak_bytes,
        "decisions": [
            {
                "storage": decision.storage,
                "technique": decision.technique,
                "bytes": decision.bytes,
                "seconds": decision.cost_s,
                "reason": decision.reason,
            }
            for decision in plan_report.decisions
        ],
        "plans": [row(plan) for plan in (plan_report.plan, *plan_report.others)],
    }


def _names(against: str) -> list[str]:
    if against == "none":
        return []
    known = policies.names()
    names = list(known) if against == "all" else [name.strip() for name in against.split(",")]
    for name in names:
        if name not in known:
            raise PlanError(
                f"--against: got planner {name!r}, expected all, none or of {', '.join(known)}."
            )
    return names
