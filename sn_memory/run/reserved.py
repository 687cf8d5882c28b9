"""Memory that a card's allocator reserves for a plan, and plans within a budget of reserved bytes.

A card runs out of memory by reserved bytes. The allocations and frees of a plan are replayed by the
allocator's rules: torch's (`cost/caching.py`) or TensorFlow's (`cost/bfc.py`). Resident storages
are allocated first; then two steps follow, since the second begins with what the first has left.

Under torch the step has its own pool, as in the executor. The gradient of an output, which a caller
computes between the passes, is not in it: like resident storages it lies outside, and cannot use
the pool's free memory (GPT-2 on an H200, logits of 1.5 GiB: 8,052 MiB reserved where one pool would
have taken 6,414). The pool begins with one free segment for all blocks above 1 MiB, which are split
off it like from an expandable segment, so that little more is reserved than is live; by default
torch reserves a segment for each large block that does not fit a free one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from ..base.errors import PlanError
from ..base.host import READ, smallest_limit
from ..base.progress import report_progress
from ..base.sizes import show_bytes
from ..cost.caching import AllocatorSettings, Reserved, Rows, Settings
from ..graph.graph import Graph
from ..plan.buffers import plan_buffers, refused
from ..plan.plan import BudgetError, Plan
from ..pool.pack import arrange
from ..pool.placing import GRAIN, GRANULE, PACK_S, classes_bytes

# A budget given as a word: what is free on the model's device.
LIMIT: Final = "limit"
# Held after planning and between steps: a thread's stack, BLAS's buffers, holes of the heap. 9 to
# 18 MiB for networks without convolutions; measured by benchmarks/process_bytes.py, whose table is
# in docs/torch_memory_measured.md.
FIXED_BYTES: Final = 24 << 20
# Code that oneDNN generates and keeps for a convolution's shapes, forward and backward: 0.3 to
# 1.9 MiB; 13 to 43 MiB in total for up to 120 convolutions.
CONVOLUTION_BYTES: Final = 3 << 20
MOST_CODE_BYTES: Final = 64 << 20
# Python objects of a plan per call of its step: 3.1 to 4.8 KB; 9 KB with 19 calls.
CALL_BYTES: Final = 8 << 10
# Share of the free memory kept for page rounding, and for calls unknown before tracing.
SHARE: Final = 1 / 32


def process_bytes(graph: Graph | None) -> int:
    """Return the bytes of a process beyond a plan's tensors and what it held before the plan.

    graph : what was planned; None if unknown, for the largest value
    """
    if graph is None:
        return FIXED_BYTES + MOST_CODE_BYTES
    names = [op.name.lower() for op in graph.ops]
    backward = ("backward", "backprop")
    # Only forward ones: the figure covers both directions of a convolution.
    code = CONVOLUTION_BYTES * sum(
        "conv" in name.rpartition("/")[2] and not any(word in name for word in backward)
        for name in names
    )
    return FIXED_BYTES + min(code, MOST_CODE_BYTES) + CALL_BYTES * len(names)


def host_budget(resident_bytes: int) -> int:
    """Return the bytes that a step on the host may hold, by the smallest limit of the process.

    resident_bytes : of the step, already allocated, which count in its budget

    Raises PlanError if no limit is known, or the smallest leaves nothing.
    """
    # The search imports this late (57 MiB with its threads' buffers): take it off the free memory.
    importlib.import_module("scipy.optimize")
    limit = smallest_limit()
    if limit is None:
        raise unknown(f"this host, where these were read: {READ}")
    margin = process_bytes(None) + int(SHARE * limit.free_bytes)
    return left(limit.name, limit.free_bytes, margin, resident_bytes, f" Read were {READ}.")


def left(name: str, free_bytes: int, margin_bytes: int, resident_bytes: int, read: str = "") -> int:
    """Return free minus margin plus resident bytes; raise PlanError if nothing is free."""
    if free_bytes <= margin_bytes:
        raise PlanError(
            f"got no budget, and the smallest limit, {name}, leaves {show_bytes(free_bytes)}; "
            f"expected more than {show_bytes(margin_bytes)}, which a process needs in addition to "
            f"its tensors. Raise that limit, or pass budget=... to try within it.{read}"
        )
    return free_bytes - margin_bytes + resident_bytes


def unknown(where: str) -> PlanError:
    """Return the error for a device whose free memory is unknown."""
    return PlanError(
        f"got no budget, and found nothing that states how much memory is free on {where}. "
        'Pass budget="6GiB", or the free bytes.'
    )


# A budget below this applies to live bytes only: torch's segments have 2 and 20 MiB, both for
# resident storages and for the step, so that no plan could keep it.
LEAST_BYTES: Final = 64 << 20
# How often a lower plan is searched, and the time of each search: a share of the first one's
# seconds, but at least as many as a first plan of some hundred ops takes.
ROUNDS, PART, LEAST_S = 4, 0.04, 0.25
# Gradients of outputs are mentioned from this share of the reserved bytes on.
_SHOWN: Final = 0.02


@dataclass(frozen=True)
class PlacingSettings:
    """The placing allocator: an arena of a packed step's height, and size classes for the rest."""

    caching: ClassVar[bool] = True
    name: ClassVar[str] = "the placing allocator"
    reserves: ClassVar[str] = "the placing allocator reserves"
    others: ClassVar[Mapping[str, Settings]] = {}

    def reserved(self, resident: Rows, step: Rows) -> Reserved:
        """Return the bytes reserved once the step is recorded."""
        rows = [(lower, upper, -(-size // GRAIN)) for lower, upper, size in step]
        height = arrange(rows, time_limit_s=PACK_S, deterministic=True).height * GRAIN
        arena = -(-height // GRANULE) * GRANULE
        return Reserved(classes_bytes(size for _, _, size in resident) + arena)

    def most(self, budget_bytes: int) -> int:
        """Return the most that can be reserved within a budget: an arena can have any size."""
        return budget_bytes


def reserved(graph: Graph, plan: Plan, settings: Settings | None = None) -> Reserved:
    """Return the bytes reserved during steps with a plan.

    settings : of the allocator; default: torch's defaults

    Examples
    --------
    >>> from sn_memory import Graph, Op, Storage
    >>> from sn_memory.plan import policies
    >>> graph = Graph(
    ...     [Storage("x", 3 << 20, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)],
    ... )
    >>> reserved(graph, policies.policy("liveness")(graph, budget_bytes=None)).peak_bytes >> 20
    22
    """
    return (settings or AllocatorSettings()).reserved(*stays(graph, plan))


def stays(graph: Graph, plan: Plan) -> tuple[Rows, Rows]:
    """Return the buffers of a plan outside of the step's pool, and those inside.

    The former exist before and after the step, or belong to the caller.
    """
    buffers = plan_buffers(graph, plan)
    # `plan_buffers` lists the resident ones first; no plan frees them.
    first = sum(storage.resident for storage in graph.storages)
    callers = _output_gradients(graph)
    outside: Rows = []
    inside: Rows = []
    for place, (name, row) in enumerate(zip(buffers.names, buffers.buffers, strict=True)):
        (outside if place < first or name in callers else inside).append(row)
    return outside, inside


def _output_gradients(graph: Graph) -> dict[str, int]:
    """Return names and bytes of the gradients of outputs, which the caller computes."""
    return {
        storage.name: storage.bytes
        for storage in graph.storages
        if storage.held and storage.role == "gradient"
    }


def within_reserved(
    graph: Graph,
    budget_bytes: int,
    search: Callable[[int, float | None], Plan],
    settings: Settings,
) -> Plan:
    """Return a plan for which the allocator reserves no more than the budget.

    graph, budget_bytes : what to plan, and the most bytes
    search : plans within a number of live bytes, in a number of seconds; None means the time limit
        as set.
    settings : of the allocator

    Raises BudgetError for a budget that no plan keeps; if the reserved bytes exceed it, the error
    names the allocator setting that would reserve less.
    """
    plan = first = search(budget_bytes, None)
    if not settings.caching:
        return replace(plan, notes=(*plan.notes, f"{settings.name}: {_NO_RULES}"))
    taken = reserved(graph, plan, settings)
    least = taken, plan
    target, most = budget_bytes, settings.most(budget_bytes)
    if budget_bytes >= LEAST_BYTES:
        for number in range(ROUNDS):
            over = taken.peak_bytes - budget_bytes
            if over <= 0:
                break
            report_progress(
                "search", number, ROUNDS, f"reserved bytes are {show_bytes(over)} above the budget"
            )
            if most < budget_bytes:
                # The excess is no measure if the last of several regions is half of their total.
                target = min(target, most * (15 - number) // 16)
            else:
                # Holes do not shrink with the plan, so later rounds go lower than by the excess.
                target = min(target, plan.peak_bytes) - over * (4 + number) // 4
            try:
                if target <= graph.base_bytes:
                    break
                plan = _searched(search, target, max(PART * first.solve_s, LEAST_S))
            except BudgetError as error:
                if error.plan is None:
                    break
                # The smallest plan there is: try it once, then stop.
                plan, target = error.plan, 0
            taken = reserved(graph, plan, settings)
            # A lower live peak may reserve more, so keep the best of all rounds.
            least = min(least, (taken, plan), key=lambda pair: pair[0].peak_bytes)
            if not target:
                break
        taken, plan = least
        if taken.peak_bytes > budget_bytes:
            raise _refused(graph, plan, taken, budget_bytes, settings)
    plan = with_reserved(replace(plan, budget_bytes=budget_bytes), taken, settings)
    return replace(plan, notes=(*plan.notes, *_notes(graph, plan, settings, first)))


def keeping_reserved(
    graph: Graph, plan: Plan, budget_bytes: int, settings: Settings | None
) -> Plan | None:
    """Return a plan with its reserved bytes; None if they exceed the budget.

    settings : of the allocator; if None, or without known rules, the plan is returned unchanged
    """
    # Without rules nothing can be predicted, and only live bytes count.
    if settings is None or not settings.caching:
        return plan
    amount = reserved(graph, plan, settings)
    if amount.peak_bytes > budget_bytes >= LEAST_BYTES:
        return None
    return with_reserved(plan, amount, settings)


def with_reserved(plan: Plan, amount: Reserved, settings: Settings) -> Plan:
    """Return the plan with its reserved bytes."""
    return replace(
        plan,
        reserved_peak_bytes=amount.peak_bytes,
        pool_bytes=amount.pool_bytes,
        allocator=settings.name,
    )


def _searched(search: Callable[[int, float | None], Plan], live_bytes: int, seconds: float) -> Plan:
    try:
        return search(live_bytes, seconds)
    except BudgetError:
        # On a busy machine a short search may miss existing plans, which is no reason to refuse.
        return search(live_bytes, None)


_NO_RULES = "reserved memory is not predicted, as the driver's rules are not public"


def _refused(
    graph: Graph, plan: Plan, taken: Reserved, budget_bytes: int, settings: Settings
) -> BudgetError:
    text = (
        f"{settings.reserves} {show_bytes(taken.peak_bytes)} for a plan of "
        f"{show_bytes(plan.peak_bytes)} of live tensors, the least of all plans tried"
    )
    instead = "make the batch smaller"
    if better := _better(graph, plan, settings, taken.peak_bytes):
        instead = f"set {better[0]}, which reserves {show_bytes(better[1])} less"
    # Reserved bytes have no op: they are the sum of all segments.
    return refused(
        text, graph, with_reserved(plan, taken, settings), budget_bytes, op=graph.ops[-1].name,
        instead=instead, nearest_bytes=taken.peak_bytes,
    )  # fmt: skip


def _notes(graph: Graph, plan: Plan, settings: Settings, first: Plan) -> list[str]:
    assert plan.reserved_peak_bytes is not None
    lines = [f"{settings.reserves} {show_bytes(plan.reserved_peak_bytes)}"]
    if plan.peak_bytes < first.peak_bytes:
        lines[0] += (
            f", so the plan holds {show_bytes(plan.peak_bytes)} where live tensors alone would "
            f"allow {show_bytes(first.peak_bytes)}"
        )
    if plan.budget_bytes is not None and plan.reserved_peak_bytes > plan.budget_bytes:
        lines[0] += (
            f", more than the budget, which below {show_bytes(LEAST_BYTES)} is kept by live "
            "tensors alone: allocators reserve memory by megabytes"
        )
    better = _better(graph, plan, settings, plan.reserved_peak_bytes)
    if better:
        lines.append(f"{better[0]} would reserve {show_bytes(better[1])} less")
    gradient_bytes = sum(_output_gradients(graph).values())
    if gradient_bytes > _SHOWN * plan.reserved_peak_bytes:
        lines.append(
            f"{show_bytes(gradient_bytes)} of it are gradients of outputs, which the caller makes "
            "outside of the plan's pool; a model that returns its loss needs none"
        )
    return lines


def _better(
    graph: Graph, plan: Plan, settings: Settings, peak_bytes: int
) -> tuple[str, int] | None:
    """Return the settings that reserve least for a plan, and how much less; None if none does."""
    less = {
        name: peak_bytes - reserved(graph, plan, other).peak_bytes
        for name, other in settings.others.items()
    }
    best = max(less, key=less.__getitem__, default="")
    return (best, less[best]) if best and less[best] > 0 else None
