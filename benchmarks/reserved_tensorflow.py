"""What TensorFlow's allocator reserves on a card for plans, simulated.

    python -m benchmarks reserved_tensorflow [--json FILE] [--models NAME ...]
    python -m benchmarks reserved_tensorflow --run NAME

For each network of planner_tensorflow.py, images of 128 pixels, batch 16: the plain step and plans
at 60 and 80 % of its peak. Live bytes are the peak of tensors, packed ones the height that
`arrange` finds for the same buffers; `region` is the one region in which the step finds room,
`growth` what regions that grow take. `kept` is a plan made for those bytes: what is reserved, or
the least that was found. Ops are those of the CPU's graph, seconds a roofline's of an H100;
searches count work, not seconds. The rows are printed as the table of docs/pool.md.

`--run` runs a planned step at 60 % on the CPU, whose allocator has the same rules for blocks from
256 KiB on, and prints what it handed out at most beside what the rules say.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from machine import origin
from planner_tensorflow import network, one_thread, training_step
from rows_file import flags, save

import sn_memory.tensorflow
from sn_memory import BudgetError, Graph, Plan, arrange, plan_buffers, plan_graph
from sn_memory.cost.bfc import BFCAllocator, BFCSettings
from sn_memory.cost.caching import replay
from sn_memory.cost.devices import named
from sn_memory.graph.liveness import unplanned_bytes
from sn_memory.plan.policies import policy
from sn_memory.run.reserved import reserved, stays, within_reserved

NETWORKS = ("vgg16", "transformer12", "resnet50", "densenet121")
SHARES = (None, 0.6, 0.8)
CARD = "h100"
SETTINGS = {
    "region": BFCSettings(),
    "growth": BFCSettings(growth=True, limit_bytes=named(CARD).usable_bytes),
}
MIB = 1 << 20
# Of the CPU's allocator: smaller blocks come from elsewhere.
LEAST_BYTES = 256 << 10


def searched(graph: Graph, live_bytes: int, seconds: float | None) -> Plan:
    """A plan within so many live bytes."""
    return plan_graph(
        graph,
        live_bytes,
        techniques=("keep", "recompute"),
        time_limit_s=10.0 if seconds is None else seconds,
        from_sqrt_n=seconds is None,
        deterministic=True,
    )


def row_of(graph: Graph, share: float | None) -> dict[str, Any]:
    """One row: bytes of a plan by live bytes, and of plans by what is reserved."""
    row: dict[str, Any] = {"network": graph.name, "share": share}
    if share is None:
        plan = policy("liveness")(graph, budget_bytes=None)
    else:
        budget = row["budget"] = int(share * unplanned_bytes(graph))
        try:
            plan = searched(graph, budget, None)
        except BudgetError as error:
            return row | {"least": error.peak_bytes}
    row["live"] = plan.peak_bytes
    row["packed"] = arrange(plan_buffers(graph, plan).buffers, time_limit_s=2).height
    for name, settings in SETTINGS.items():
        row[name] = reserved(graph, plan, settings).peak_bytes
        if share is not None:
            try:
                kept = within_reserved(
                    graph, budget, lambda live, s: searched(graph, live, s), settings
                )
            except BudgetError as error:
                row[f"kept, {name}"] = {"least": error.peak_bytes}
                continue
            row[f"kept, {name}"] = {
                "reserved": kept.reserved_peak_bytes,
                "overhead": kept.overhead,
            }
    return row


def line_of(row: dict[str, Any]) -> str:
    """The row of the page's table; percent over the packed height."""
    budget = "plain"
    if row["share"] is not None:
        budget = f"{row['budget'] / MIB:.0f} ({row['share']:.0%})"
    if "live" not in row:
        return f"| {row['network']} | {budget} | refused: {row['least'] / MIB:.0f} | | | | | |"
    cells = [row["network"], budget, f"{row['live'] / MIB:.0f}"]
    cells.append(f"{100 * (row['packed'] / row['live'] - 1):+.1f} %")
    cells += [f"{100 * (row[name] / row['packed'] - 1):+.1f} %" for name in SETTINGS]
    for name in SETTINGS:
        kept = row.get(f"kept, {name}", {})
        if "least" in kept:
            cells.append(f"refused: {kept['least'] / MIB:.0f}")
        elif kept:
            time = f"{100 * kept['overhead']:+.1f} %"
            cells.append(f"{kept['reserved'] / MIB:.0f}, op time {time}")
        else:
            cells.append("")
    return f"| {' | '.join(cells)} |"


def run(name: str) -> None:
    """Print what a planned step is handed out here, measured and on paper."""
    model, x = network(name, 128, 16)
    step = sn_memory.tensorflow.plan_step(training_step(model), (x,), "60%", profile=False)
    graph, plan = step.sn_memory.trace.graph, step.sn_memory.plan
    memory = BFCAllocator(BFCSettings(growth=True, gives_back=False))
    resident, rows = ([row for row in rows if row[2] >= LEAST_BYTES] for rows in stays(graph, plan))
    for number, (_, _, size) in enumerate(resident):
        memory.allocate(("resident", number), size)
    replay(memory, rows)
    step(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    step(x)
    measured = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    paper = memory.peak_allocated_bytes
    print(
        f"{name}: live {plan.peak_bytes / MIB:.1f} MiB, on paper {paper / MIB:.1f}, "
        f"handed out {measured / MIB:.1f} ({100 * (measured / paper - 1):+.1f} %)"
    )


def main() -> None:
    """Plan, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--run", choices=list(NETWORKS))
    options = parser.parse_args()
    if options.run:
        one_thread()
        run(options.run)
        return
    rows: list[dict[str, Any]] = []
    print("| network | budget | live, MiB | packed | one region | growth | kept: region | growth |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        model, x = network(name, 128, 16)
        graph = sn_memory.tensorflow.trace(model, x, device=CARD, profile=False).graph
        for share in SHARES:
            rows.append(row_of(graph, share) | {"network": name})
            print(line_of(rows[-1]), flush=True)
    save(options.json, origin() | {"card": CARD, "rows": rows})


if __name__ == "__main__":
    main()
