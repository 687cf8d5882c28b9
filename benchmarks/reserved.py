"""Reserved over live over packed bytes: the overhead of torch's caching allocator, simulated.

    python -m benchmarks reserved [--json FILE] [--models NAME ...] [--cards NAME ...]
                                  [--time-limit SECONDS] [--no-kept]

For each network of planner_torch.py, traced without memory for three named cards: the plain step
and plans at 60, 70 and 80 % of its unplanned peak. Live bytes are the peak of tensors and scratch,
packed ones the height that `arrange` finds for the same buffers, reserved ones what torch's
allocator takes by its rules: by default, with a first segment (`first`), and with expandable
segments. `placed` and `classes` are what the placing allocator (`use_placing_allocator`) takes of
address space for the same allocations, by its own library over host memory: with a recorded step
(its arena is `arena`, the height of the step alone `step`; `recording` is the first step's peak)
and with nothing recorded. `kept`, which
--no-kept leaves out, is a plan made for reserved bytes, by default and with expandable segments:
what is reserved over its budget, or why there is none. Rows already in FILE are kept, so a run that
was cut off goes on. `--table` prints the rows in FILE for docs/pool.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from machine import origin
from planner_torch import FULL
from rows_file import flags, load, save
from tables import markdown

import sn_memory.torch
from sn_memory import BudgetError, Graph, Plan, arrange, plan_buffers, plan_graph
from sn_memory.cost.caching import AllocatorSettings, CachingAllocator, replay
from sn_memory.graph.liveness import unplanned_bytes
from sn_memory.plan.policies import policy
from sn_memory.pool.placing import GRAIN, GRANULE, PACK_S, PlacingAllocator
from sn_memory.run.reserved import reserved, stays, within_reserved

CARDS = ("h100", "a100-40gb", "rtx 4090")
SHARES = (0.6, 0.7, 0.8)
SETTINGS = {"default": AllocatorSettings(), "expandable": AllocatorSettings(expandable=True)}
TECHNIQUES = ("keep", "recompute")
MIB = 1 << 20


def one_pool(graph: Graph, plan: Plan, settings: AllocatorSettings) -> int:
    """What is reserved where all is in one pool that begins with nothing, as without a plan."""
    resident, step = stays(graph, plan)
    memory = CachingAllocator(settings)
    for number, (_, _, size) in enumerate(resident):
        memory.allocate(("resident", number), size)
    replay(memory, step)
    return memory.peak_reserved_bytes


def through_placing(graph: Graph, plan: Plan, *, records: bool) -> dict[str, int]:
    """What the placing allocator reserves for a plan's allocations, from the second step on."""
    resident, rows = stays(graph, plan)
    memory = PlacingAllocator("host")
    try:
        pool = memory.new_pool(0)
        for _, _, size in resident:
            memory.allocate(size)
        first = 0
        for _ in range(3):
            if records:
                memory.begin(pool, 1)
            with memory.inside(pool):
                replay(_Held(memory), rows)
            first = first or memory.statistics().peak_reserved_bytes
        now, step = memory.statistics(), memory.step_statistics(pool, 1)
    finally:
        memory.close()
    assert step.misses == step.kept == step.skipped == 0
    if not records:
        return {"classes": now.reserved_bytes}
    return {"placed": now.reserved_bytes, "arena": now.arena_bytes, "recording": first}


class _Held:
    """Addresses by key, for `replay`."""

    def __init__(self, memory: PlacingAllocator) -> None:
        self.memory, self.at = memory, {}

    def allocate(self, key: object, nbytes: int) -> None:
        self.at[key] = self.memory.allocate(nbytes)

    def free(self, key: object) -> None:
        if address := self.at.pop(key):
            self.memory.release(address)


def columns(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Live, packed and reserved bytes of a plan."""
    packing = arrange(plan_buffers(graph, plan).buffers, time_limit_s=1)
    step = arrange(
        [(lower, upper, -(-size // GRAIN)) for lower, upper, size in stays(graph, plan)[1]],
        time_limit_s=PACK_S,
        deterministic=True,
    )
    placed = through_placing(graph, plan, records=True)
    # Rows come in another order, that of events, so that a search may end elsewhere.
    assert abs(placed["arena"] - step.height * GRAIN) < 0.01 * placed["arena"] + GRANULE
    return {
        "step": step.height * GRAIN,
        "step_proved": step.proved,
        **placed,
        **through_placing(graph, plan, records=False),
        "live": plan.peak_bytes,
        "packed": packing.height,
        "default": one_pool(graph, plan, SETTINGS["default"]),
        "expandable": one_pool(graph, plan, SETTINGS["expandable"]),
        "first": reserved(graph, plan, SETTINGS["default"]).peak_bytes,
    }


def kept(graph: Graph, budget: int, first: Plan, limit_s: float) -> dict[str, Any]:
    """Plans for reserved bytes: what each reserves, or the least that was found, and seconds."""
    by_setting: dict[str, Any] = {}

    def search(live: int, seconds: float | None) -> Plan:
        # The first search is the same for all settings.
        if seconds is None and live == budget:
            return first
        return plan_graph(
            graph,
            live,
            techniques=TECHNIQUES,
            time_limit_s=seconds or limit_s,
            deterministic=True,
            from_sqrt_n=False,
        )

    for name, settings in SETTINGS.items():
        began = time.perf_counter()
        try:
            plan = within_reserved(graph, budget, search, settings)
            row = {"reserved": plan.reserved_peak_bytes, "live": plan.peak_bytes}
            row |= {"overhead": plan.overhead}
        except BudgetError as error:
            row = {"least": error.peak_bytes}
        # Beside the first search, which is the same with and without.
        by_setting[name] = {**row, "more_s": time.perf_counter() - began}
    return by_setting


def rows_of(name: str, card: str, limit_s: float, *, with_kept: bool) -> list[dict[str, Any]]:
    """The rows of a network on a card."""
    with torch.device("meta"):
        model, sample = FULL[name][0](), FULL[name][1]()
    graph = sn_memory.torch.trace(model, sample, device=card, profile=False).graph
    unplanned = unplanned_bytes(graph)
    head = {"network": name, "card": card, **origin()}
    plain = policy("liveness")(graph, budget_bytes=None)
    rows = [{**head, "share": None, "unplanned": unplanned, **columns(graph, plain)}]
    for share in SHARES:
        budget = int(share * unplanned)
        row = {**head, "share": share, "budget": budget}
        began = time.perf_counter()
        try:
            plan = plan_graph(
                graph, budget, techniques=TECHNIQUES, time_limit_s=limit_s, deterministic=True
            )
            row |= {"seconds": time.perf_counter() - began, "overhead": plan.overhead}
            row |= columns(graph, plan)
            if with_kept:
                row["kept"] = kept(graph, budget, plan, limit_s)
        except BudgetError as error:
            row["least"] = error.peak_bytes
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for docs/pool.md; over the packed height in percent."""
    head = (
        "network, card", "budget", "live, MiB", "packed", "default", "expandable", "first segment",
        "placed", "nothing recorded", "kept: default", "kept: expandable",
    )  # fmt: skip
    lines = []
    for row in rows:
        name = f"{row['network']}, {row['card']}"
        budget = (
            "plain" if row["share"] is None else f"{row['budget'] / MIB:.1f} ({row['share']:.0%})"
        )
        if "live" not in row:
            lines.append([name, budget, f"refused: {row['least'] / MIB:.1f}", *[""] * 8])
            continue
        over = [
            f"{100 * (row[allocator] / row['packed'] - 1):+.1f} %" if allocator in row else ""
            for allocator in ("default", "expandable", "first", "placed", "classes")
        ]
        live = f"{row['live'] / MIB:.1f}"
        packed = f"{100 * (row['packed'] / row['live'] - 1):+.1f} %"
        held = []
        for setting in SETTINGS:
            planned = row.get("kept", {}).get(setting)
            if planned is None:
                held.append("")
            elif "least" in planned:
                held.append(f"refused: {planned['least'] / MIB:.0f}")
            else:
                held.append(
                    f"{planned['reserved'] / MIB:.0f}, op time {100 * planned['overhead']:+.1f} %"
                )
        lines.append([name, budget, live, packed, *over, *held])
    return markdown(head, lines)


def main() -> None:
    """Run what FILE lacks."""
    parser = flags(__doc__, Path("benchmarks/results/reserved.json"))
    parser.add_argument("--models", nargs="+", default=list(FULL), choices=list(FULL))
    parser.add_argument("--time-limit", type=float, default=4.0)
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=CARDS)
    parser.add_argument("--no-kept", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = load(options.json)
    if options.table:
        print(table(rows))
        return
    torch.set_num_threads(1)
    done = {(row["network"], row["card"]) for row in rows}
    for card in options.cards:
        for name in options.models:
            if (name, card) not in done:
                rows += rows_of(name, card, options.time_limit, with_kept=not options.no_kept)
                save(options.json, rows)
                print(name, card, flush=True)


if __name__ == "__main__":
    main()
