"""The command `report`: tables on the terminal, a page and a picture in files."""

from __future__ import annotations

import argparse
from typing import Any

from ..base.errors import PlanError
from ..graph.graph import Graph
from ..plan import policies
from ..plan.plan import Plan
from ..report.report import report


def add_report(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    it = commands.add_parser("report", help="tables and pictures of a plan")
    it.add_argument("graph", help="graph file (docs/graph_format.md)")
    it.add_argument("plan", help="plan file")
    it.add_argument("-o", "--output", help="HTML page to write; it needs no other file")
    it.add_argument("--png", help="picture to write")
    it.add_argument(
        "--against",
        default="all",
        help="planners to compare with, for the same budget: names with commas, all (default), or "
        "none",
    )
    it.add_argument("--rows", type=int, default=40, help="decisions on the terminal (default 40)")
    it.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> str:
    graph, plan = Graph.from_json(options.graph), Plan.from_json(options.plan)
    others = [
        policies.policy(name)(graph, budget_bytes=plan.budget_bytes)
        for name in _names(options.against)
    ]
    made = report(graph, plan, others=others)
    if options.output is not None:
        made.write_html(options.output)
    if options.png is not None:
        made.write_png(options.png)
    return made.text(rows=options.rows).rstrip("\n")


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
