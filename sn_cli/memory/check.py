"""The command `check`: replays a plan on its graph."""

from __future__ import annotations

import argparse
from typing import Any

from sn_memory import Plan, PlanError, check_plan
from sn_memory.base.sizes import show_bytes

from ..command import Answer, add_command
from .graphs import GRAPH_HELP, read_graph


def add_check(commands: Any) -> None:
    """Add the command to its group."""
    parser = add_command(commands, "check", _check, help="replay a plan and check its figures")
    parser.add_argument("graph", help=GRAPH_HELP)
    parser.add_argument("plan", help="plan file")


def _check(options: argparse.Namespace) -> Answer:
    graph, plan = read_graph(options.graph), Plan.from_json(options.plan)
    try:
        replay = check_plan(graph, plan)
    except PlanError as wrong:
        return Answer(f"no: {wrong}", {"why": str(wrong)}, yes=False)
    data = {
        "actions": len(plan.actions),
        "peak_bytes": int(replay.peak_bytes),
        "peak_action": int(replay.peak_action),
        "seconds": float(replay.seconds),
        "reruns": int(replay.reruns),
        "host_peak_bytes": int(replay.host_peak_bytes),
    }
    return Answer(
        f"yes: {len(plan.actions)} actions, peak {show_bytes(replay.peak_bytes)} "
        f"({replay.peak_bytes} bytes) at action {replay.peak_action}, {replay.seconds:.6g} s, "
        f"{replay.reruns} reruns, {show_bytes(replay.host_peak_bytes)} on the host",
        data,
    )
