"""`sn memory`: graphs of training steps, plans, reports and packings as files."""

from __future__ import annotations

from typing import Any

from .check import add_check
from .estimate import add_estimate
from .export import add_export
from .pack import add_pack
from .plan import add_plan
from .report import add_report


def add_memory(groups: Any) -> None:
    """Add the group to those of `sn`."""
    summary = "what a training step holds in memory: estimated, planned, checked, shown"
    group = groups.add_parser("memory", help=summary, description=f"{summary.capitalize()}.")
    commands = group.add_subparsers(required=True, metavar="estimate|export|plan|check|report|pack")
    add_estimate(commands)
    add_export(commands)
    add_plan(commands)
    add_check(commands)
    add_report(commands)
    add_pack(commands)
