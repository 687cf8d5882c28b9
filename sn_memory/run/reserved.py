"""What the allocator of a card reserves for a plan, and plans that keep a budget of that.

A card runs out of reserved bytes. The allocations and frees of a plan are replayed through the
allocator's rules: torch's (`cost/caching.py`) or TensorFlow's (`cost/bfc.py`). What is resident is
there before; then come two steps in a row, since the second begins with what the first has left.

Under torch the step has a pool of its own, as the executor has it. The gradient of an output that
a caller makes between the passes is not in it: it lies outside as residents do, and cannot take
what the pool has free (GPT-2 on an H200, logits of 1.5 GiB: 8,052 MiB reserved where one pool would
have taken 6,414). The pool begins with one free segment for all blocks above 1 MiB, from which they
are cut as from a segment that grows, so that little more is reserved than is live; by default torch
reserves a segment for each large block that finds no room.
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

# A budget in a word: what is free where the model is.
LIMIT: Final = "limit"
# Kept after a plan and between its steps: the stack of a thread, BLAS's buffers, the heap's holes.
# 9 to 18 MiB of networks without convolutions; results of benchmarks/process_bytes.py, whose table
# is in docs/torch_memory_measured.md.
FIXED_BYTES: Final = 24 << 20
# Code that oneDNN makes for the shapes of a convolution, forward and backward, and keeps: 0.3 to
# 1.9 MiB; of up to 120 convolutions 13 to 43 MiB together.
CONVOLUTION_BYTES: Final = 3 << 20
MOST_CODE_BYTES: Final = 64 << 20
# Objects of a plan for each call of its step: 3.1 to 4.8 KB, of 19 calls 9.
CALL_BYTES: Final = 8 << 10
# Of what is free, for ends of pages and calls that are not known before a step is traced.
SHARE: Final = 1 / 32


def process_bytes(graph: Graph | None) -> int:
    """Return what a process takes beyond a plan's tensors and what it held before the plan.

    graph : what was planned; None where that is not known, and the most is taken
    """
    if graph is None:
        return FIXED_BYTES + MOST_CODE_BYTES
    names = [op.name.lower() for op in graph.ops]
    backward = ("backward", "backprop")
    # Forward ones only: the figure has both directions of a convolution.
    code = CONVOLUTION_BYTES * sum(
        "conv" in name.rpartition("/")[2] and not any(word in name for word in backward)
        for name in names
    )
    return FIXED_BYTES + min(code, MOST_CODE_BYTES) + CALL_BYTES * len(names)


def host_budget(resident_bytes: int) -> int:
    """Return the bytes that a step on the host may hold, by the smallest limit of the process.

    resident_bytes : what of the step is there already, and counts in its budget

    Raises PlanError where no limit is known, or the smallest leaves nothing.
    """
    # What the search imports late (57 MiB with its threads' buffers) is no room for tensors.
    importlib.import_module("scipy.optimize")
    limit = smallest_limit()
    if limit is None:
        raise unknown(f"this host, where these were read: {READ}")
    margin = process_bytes(None) + int(SHARE * limit.free_bytes)
    return left(limit.name, limit.free_bytes, margin, resident_bytes, f" Read were {READ}.")


def left(name: str, free_bytes: int, margin_bytes: int, resident_bytes: int, read: str = "") -> int:
    """Return what is free, less a margin, with what is resident; PlanError if nothing is free."""
    if free_bytes <= margin_bytes:
        raise PlanError(
            f"got no budget, and the smallest limit, {name}, leaves {show_bytes(free_bytes)}; "
            f"expected more than {show_bytes(margin_bytes)}, which a process needs in addition to "
            f"its tensors. Raise that limit, or pass budget=... to try within it.{read}"
        )
    return free_bytes - margin_bytes + resident_bytes


def unknown(where: str) -> PlanError:
    """Return the error where nothing says what is free."""
    return PlanError(
        f"got no budget, and found nothing that states how much memory is free on {where}. "
        'Pass budget="6GiB", or the bytes there are.'
    )


# A budget below this is kept by live bytes alone: torch's segments are of 2 and 20 MiB, for what
# is resident and for the step, so that no plan could keep it.
LEAST_BYTES: Final = 64 << 20
# How often a plan is made lower, and what each search may take: of the first one's seconds, or as
# many as finding a first plan of some hundred ops takes.
ROUNDS, PART, LEAST_S = 4, 0.04, 0.25
# Gradients of outputs are named from this part of what is reserved on.
_SHOWN: Final = 0.02


@dataclass(frozen=True)
class PlacingSettings:
    """The placing allocator: an arena as high as a step is packed, and classes of the rest."""

    caching: ClassVar[bool] = True
    name: ClassVar[str] = "the placing allocator"
    reserves: ClassVar[str] = "the placing allocator reserves"
    others: ClassVar[Mapping[str, Settings]] = {}

    def reserved(self, resident: Rows, step: Rows) -> Reserved:
        """Return what is reserved once the step was recorded."""
        rows = [(lower, upper, -(-size // GRAIN)) for lower, upper, size in step]
        height = arrange(rows, time_limit_s=PACK_S, deterministic=True).height * GRAIN
        arena = -(-height // GRANULE) * GRANULE
        return Reserved(classes_bytes(size for _, _, size in resident) + arena)

    def most(self, budget_bytes: int) -> int:
        """Return the most that can be reserved within a budget: an arena is of any size."""
        return budget_bytes


def reserved(graph: Graph, plan: Plan, settings: Settings | None = None) -> Reserved:
    """Return what is reserved during steps with a plan.

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
    """Return the buffers of a plan that are not of the step's pool, and those that are.

    The former are there from before to after the step, or a caller's.
    """
    buffers = plan_buffers(graph, plan)
    # `plan_buffers` has the resident ones in front; no plan frees one of them.
    first = sum(storage.resident for storage in graph.storages)
    callers = _output_gradients(graph)
    outside: Rows = []
    inside: Rows = []
    for place, (name, row) in enumerate(zip(buffers.names, buffers.buffers, strict=True)):
        (outside if place < first or name in callers else inside).append(row)
    return outside, inside


def _output_gradients(graph: Graph) -> dict[str, int]:
    """Return gradients of outputs, which the caller makes, by name, with their bytes."""
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

    graph, budget_bytes : what is planned, and the most bytes
    search : plans within so many live bytes, in so many seconds; None is the time limit as it was
        set.
    settings : of the allocator

    Raises BudgetError for a budget that no plan keeps; naming the setting that would reserve less,
    where it is what the allocator reserves that breaks it.
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
                # What is over is no measure where the last of several regions is half of them.
                target = min(target, most * (15 - number) // 16)
            else:
                # Holes do not shrink with the plan, so later rounds go lower than by what is over.
                target = min(target, plan.peak_bytes) - over * (4 + number) // 4
            try:
                if target <= graph.base_bytes:
                    break
                plan = _searched(search, target, max(PART * first.solve_s, LEAST_S))
            except BudgetError as error:
                if error.plan is None:
                    break
                # The smallest that there is: tried once, and then no more.
                plan, target = error.plan, 0
            taken = reserved(graph, plan, settings)
            # A lower peak of live bytes may reserve more, so the best of all rounds is kept.
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
    """Return a plan with what is reserved for it; None where that is above the budget.

    settings : of the allocator; where there is none, or none with rules, the plan as it is
    """
    # Without rules nothing can be predicted, and live bytes have to do.
    if settings is None or not settings.caching:
        return plan
    amount = reserved(graph, plan, settings)
    if amount.peak_bytes > budget_bytes >= LEAST_BYTES:
        return None
    return with_reserved(plan, amount, settings)


def with_reserved(plan: Plan, amount: Reserved, settings: Settings) -> Plan:
    """Return a plan that says what is reserved for it."""
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
        # On a busy machine a short search may miss what there is: it is no reason to refuse.
        return search(live_bytes, None)


_NO_RULES = "reserved memory is not predicted, as the driver's rules are not public"


def _refused(
    graph: Graph, plan: Plan, taken: Reserved, budget_bytes: int, settings: Settings
) -> BudgetError:
    text = (
        f"{settings.reserves} {show_bytes(taken.peak_bytes)} for a plan of "
        f"{show_bytes(plan.peak_bytes)} of live tensors, the least of those that were tried"
    )
    instead = "make the batch smaller"
    if better := _better(graph, plan, settings, taken.peak_bytes):
        instead = f"set {better[0]}, which reserves {show_bytes(better[1])} less"
    # What is reserved has no op of its own: it is the sum of all segments.
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
    """Return the settings that reserve least for a plan, and how much less; None for none."""
    less = {
        name: peak_bytes - reserved(graph, plan, other).peak_bytes
        for name, other in settings.others.items()
    }
    best = max(less, key=less.__getitem__, default="")
    return (best, less[best]) if best and less[best] > 0 else None
