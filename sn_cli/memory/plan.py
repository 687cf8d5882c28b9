"""The command `plan`: plans a graph within a budget."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import replace
from typing import Any

from sn_memory import Plan, PlanError, plan_graph
from sn_memory.base.sizes import show_bytes
from sn_memory.cost.bfc import BFCSettings
from sn_memory.cost.caching import AllocatorSettings, Settings
from sn_memory.cost.devices import named
from sn_memory.plan.plan import TECHNIQUES
from sn_memory.plan.policies import names as planner_names
from sn_memory.run.reserved import reserved, with_reserved

from ..command import Answer, add_command, output_file
from .graphs import GRAPH_HELP, read_graph


def add_plan(commands: Any) -> None:
    """Add the command to its group."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        help="plan a graph within a memory budget",
        epilog="exit code 1: no plan keeps the budget; the smallest peak found is printed",
    )
    parser.add_argument("graph", help=GRAPH_HELP)
    parser.add_argument(
        "--budget",
        help='bytes, "4GiB", or "60%%" (0.6) of the unplanned peak; default: all of --device',
    )
    parser.add_argument(
        "--device", help="a named device, such as h100, whose speeds replace the graph's own"
    )
    parser.add_argument(
        "-o", "--output", type=output_file, help="plan file to write; default: only a summary"
    )
    parser.add_argument(
        "--planner", default="auto", choices=["auto", *planner_names()], help="default: auto"
    )
    parser.add_argument(
        "--techniques", default=",".join(TECHNIQUES), help="what auto may use (default %(default)s)"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument(
        "--deterministic", action="store_true", help="count work instead of seconds"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _plan(options: argparse.Namespace) -> Answer:
    graph, budget = read_graph(options.graph), options.budget
    if options.device is not None:
        spec = named(options.device)
        graph = replace(graph, device=spec.device())
        budget = spec.usable_bytes if budget is None else budget
    if budget is None:
        raise PlanError(
            "got neither --budget nor --device; expected bytes, or a device whose "
            "memory is the budget."
        )
    plan = plan_graph(
        graph,
        budget,
        planner=options.planner,
        techniques=[technique.strip() for technique in options.techniques.split(",")],
        time_limit_s=options.time_limit,
        deterministic=options.deterministic,
        progress=not options.quiet,
    )
    settings: Settings | None = None
    if graph.allocator == "torch":
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        text = next((os.environ[name] for name in names if name in os.environ), "")
        settings = AllocatorSettings.of(text)
    elif graph.allocator == "tensorflow" and options.device is not None:
        settings = BFCSettings()
    if settings is not None:
        plan = with_reserved(plan, reserved(graph, plan, settings), settings)
    if options.output is not None:
        plan.to_json(options.output)
    return Answer(_summary(plan), _data(plan))


def _summary(plan: Plan) -> str:
    """Return a summary of a plan in a few lines."""
    counts = Counter(decision.technique for decision in plan.decisions)
    done = ", ".join(f"{count} {technique}" for technique, count in sorted(counts.items()))
    sources = ", ".join(f"{count} {source}" for source, count in plan.seconds_sources.items())
    reserved_bytes = plan.reserved_peak_bytes
    by = (
        ()
        if reserved_bytes is None
        else (f"reserved  {show_bytes(reserved_bytes)} by {plan.allocator}",)
    )
    return "\n".join(
        (
            f"planner   {plan.planner}, {plan.solve_s:.2f} s",
            f"peak      {show_bytes(plan.baseline_peak_bytes)} -> {show_bytes(plan.peak_bytes)}",
            *by,
            f"seconds   {plan.baseline_seconds:.6g} -> {plan.seconds:.6g} ({plan.overhead:+.2%})",
            f"bound     {plan.lower_bound_seconds:.6g}, gap {plan.gap:.2%}",
            f"storages  {done}",
            f"times     {sources}",
        )
    )


def _data(plan: Plan) -> dict[str, Any]:
    counts = Counter(decision.technique for decision in plan.decisions)
    return {
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "reserved_peak_bytes": plan.reserved_peak_bytes,
        "baseline_seconds": plan.baseline_seconds,
        "seconds": plan.seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "solve_s": plan.solve_s,
        "storages": dict(sorted(counts.items())),
        "seconds_sources": dict(plan.seconds_sources),
    }
