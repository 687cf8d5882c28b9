"""SuperNeurons' stages on AlexNet at batch 200, as the paper counts memory.

    python -m benchmarks planner_alexnet [--json FILE]

The paper (Wang et al., PPoPP 2018) counts functional tensors: layer outputs and their gradients,
not weights, their gradients or the batch. So those have 0 bytes here. Its figures are recalled,
not read: 2189.4 MB with everything kept, 1489.4 by liveness, 1132.2 with offload, 886.4 with
recomputation, and 14, 23 and 17 extra layer runs for the three rules.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from graphs import K40_LIKE, alexnet
from machine import origin
from rivals.planners.walk import carry_out, follow, offloadable, origins
from rows_file import flags, save
from tables import columns

from sn_memory import Graph, Plan, check_plan
from sn_memory.plan.policies import is_checkpoint, is_conv, policy

PAPER_MB = {"baseline": 2189.4, "liveness": 1489.4, "+offload": 1132.2, "+recompute": 886.4}
PAPER_RERUNS = {"superneurons_speed": 14, "superneurons_memory": 23, "superneurons": 17}


def functional(graph: Graph) -> Graph:
    """The graph with only functional tensors taking memory."""
    updates = {name for op in graph.ops if op.phase == "update" for name in op.inputs}
    storages = [
        replace(s, bytes=0) if s.resident or s.name in updates else s for s in graph.storages
    ]
    return Graph(storages, graph.ops, name=graph.name, device=graph.device)


def whole_layers(graph: Graph) -> Graph:
    """The graph with layers of that time: each backward op reads its layer's input and output.

    The positions of the maxima that our pooling keeps are not needed then.
    """
    forward = {op.name: op for op in graph.ops if op.phase == "forward"}
    ops = []
    for op in graph.ops:
        layer = forward.get(op.name.removesuffix(".back"))
        if layer is not None and op.phase == "backward":
            op = replace(
                op, inputs=tuple(dict.fromkeys((*op.inputs, *layer.inputs, *layer.outputs)))
            )
        ops.append(op)
    storages = [replace(s, bytes=0) if s.name.endswith(".index") else s for s in graph.storages]
    return Graph(storages, ops, name=graph.name, device=graph.device)


def offload_only(graph: Graph) -> Plan:
    """Liveness, and outputs of convolutions on the host."""
    origin = origins(graph)
    kept = {s for s, forward in enumerate(origin.forward) if forward}
    convolutions = {s for s in kept if is_conv(graph, origin.makers[s][0])}
    moved = offloadable(graph, follow(graph, kept=kept), convolutions)
    events = follow(
        graph, kept=kept, offloaded=moved, checkpoint=lambda op: is_checkpoint(graph, op)
    )
    return carry_out(graph, events, planner="offload_only")


def stages(graph: Graph, layers: str) -> list[dict[str, Any]]:
    """Plan, print and return the rows of all stages for one kind of layers."""
    by_stage: dict[str, tuple[int, Plan | None]] = {
        "baseline": (sum(s.bytes for s in graph.storages), None)
    }
    for stage, plan in (
        ("liveness", policy("liveness")(graph, budget_bytes=None)),
        ("+offload", offload_only(graph)),
        ("+recompute", policy("superneurons")(graph, budget_bytes=None)),
        ("superneurons_speed", policy("superneurons_speed")(graph, budget_bytes=None)),
        ("superneurons_memory", policy("superneurons_memory")(graph, budget_bytes=None)),
        ("superneurons", policy("superneurons")(graph, budget_bytes=None)),
    ):
        by_stage[stage] = plan.peak_bytes, plan
    rows, lines = [], []
    for stage, (peak_bytes, stage_plan) in by_stage.items():
        reruns = check_plan(graph, stage_plan).reruns if stage_plan else None
        rows.append(
            {
                "model": "alexnet",
                "batch": 200,
                "layers": layers,
                "stage": stage,
                "peak_bytes": peak_bytes,
                "paper_mb_recalled": PAPER_MB.get(stage),
                "reruns": reruns,
                "paper_reruns_recalled": PAPER_RERUNS.get(stage),
                "predicted_s": stage_plan.seconds if stage_plan else None,
                "baseline_s": stage_plan.baseline_seconds if stage_plan else None,
                "device": graph.device.name,
                **origin(),
            }
        )
        slow = f"{stage_plan.overhead:+.1%}" if stage_plan else ""
        ours, papers = "" if reruns is None else str(reruns), str(PAPER_RERUNS.get(stage, ""))
        mib, paper_mb = f"{peak_bytes / 2**20:.1f}", str(PAPER_MB.get(stage, ""))
        lines.append([stage, mib, paper_mb, ours, papers, slow])
    head = (f"layers as in {layers}", "MiB", "paper MB", "reruns", "paper", "time")
    print(f"\n{columns(head, lines)}")
    return rows


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    args = parser.parse_args(argv)
    lean = functional(alexnet(200, device=K40_LIKE).graph())
    rows = stages(lean, "torch") + stages(whole_layers(lean), "paper")
    save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
