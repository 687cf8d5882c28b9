"""The picture and page of docs/report.md: ResNet-50 in half its memory, beside the named planners.

    python benchmarks/report_picture.py [--png FILE] [--html FILE]

Seconds are a roofline's on the graph's device, not measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from graphs import resnet

from sn_memory import plan_graph
from sn_memory.plan import policies
from sn_memory.report.report import report


def main() -> None:
    """Plan, report, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE")
    args = parser.parse_args()
    graph = resnet(batch=32, depth=50).graph()
    plan = plan_graph(graph, "50%", time_limit_s=30)
    others = [
        policies.policy(name)(graph, budget_bytes=plan.budget_bytes) for name in policies.names()
    ]
    others += [plan_graph(graph, f"{part}%", time_limit_s=30) for part in (80, 65, 40, 30)]
    made = report(graph, plan, others=others)
    print(made.text(rows=10), end="")
    if args.png:
        made.write_png(args.png)
    if args.html:
        made.write_html(args.html)


if __name__ == "__main__":
    main()
