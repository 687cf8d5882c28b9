"""Picture and page of docs/report.md: ResNet-50 in half its memory, and the named planners.

    python -m benchmarks report_picture [--png FILE] [--html FILE]

Seconds are a roofline's on the graph's device, not measured. Convolutions take the fastest of their
algorithms and its scratch; what is reserved is by the rules of torch's allocator.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from graphs import resnet
from rivals.planners import PLANNERS

from sn_memory import Graph, plan_graph
from sn_memory.cost.caching import AllocatorSettings
from sn_memory.graph.liveness import peak
from sn_memory.report.report import report
from sn_memory.run.reserved import within_reserved


def _by_the_fastest(graph: Graph) -> Graph:
    ops = [
        replace(op, workspaces=tuple(sorted(op.workspaces, key=lambda form: form.seconds or 0)[:1]))
        for op in graph.ops
    ]
    return Graph(graph.storages, ops, name=graph.name, device=graph.device)


def main() -> None:
    """Plan, report, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE")
    args = parser.parse_args()
    graph = _by_the_fastest(resnet(batch=32, depth=50, workspaces=True).graph())
    plan = within_reserved(
        graph,
        peak(graph).bytes // 2,
        lambda live_bytes, _: plan_graph(graph, live_bytes, time_limit_s=30),
        AllocatorSettings(),
    )
    others = [planner(graph, budget_bytes=plan.budget_bytes) for planner in PLANNERS.values()]
    others += [plan_graph(graph, f"{part}%", time_limit_s=30) for part in (80, 65, 40, 30)]
    page = report(graph, plan, others=others)
    print(page.text(rows=10), end="")
    if args.png:
        page.write_png(args.png)
    if args.html:
        page.write_html(args.html)


if __name__ == "__main__":
    main()
