"""Independent validators: `check_plan` replays a plan, `check_packing` checks offsets.

They share nothing with the planner and the packers, which a test enforces. The replay keeps the
simplest possible state (which version of what is on the device, what is on the host, when each lane
is free again) and follows `docs/graph_format.md` exactly; that page is the description of this file
for people.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .base.errors import PackError, PlanError
from .graph.graph import Graph
from .plan.plan import Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Predicted and replayed seconds sum the same terms, possibly in another order: n relative rounding
# errors of 2**-53 stay far below this for any n that fits in memory.
SECONDS_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Replay:
    """The result of replaying a plan.

    Parameters
    ----------
    peak_bytes, peak_action
        The most live bytes and the first action that reached it.
    seconds
        When the last op ended, waits for transfers included.
    host_peak_bytes
        The most bytes held on the host.
    live_bytes
        [actions] int64, bytes live during each action, including workspace and duplicates.
    start_s, end_s
        [actions] float64, when each ran on its lane; for `free`, when the memory was freed.
    reruns
        The number of runs that were not the first of their op.
    """

    peak_bytes: int
    peak_action: int
    seconds: float
    host_peak_bytes: int
    live_bytes: Ints
    start_s: Floats
    end_s: Floats
    reruns: int


def check_plan(graph: Graph, plan: Plan) -> Replay:
    """Replay a plan; return its peak and seconds.

    Raises PlanError naming the first violation: an invalid action, an op that is missing or out of
    order, a lost result, host memory or the budget exceeded, or a prediction that the replay does
    not confirm.
    """
    replay = carry_out(graph, plan)
    if plan.budget_bytes is not None and replay.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"action {replay.peak_action} ({_said(plan, replay.peak_action)}): "
            f"{replay.peak_bytes} bytes are live, the budget is {plan.budget_bytes}."
        )
    if replay.peak_bytes != plan.peak_bytes:
        raise PlanError(
            f"peak_bytes: the plan says {plan.peak_bytes}, the replay reached {replay.peak_bytes} "
            f"at action {replay.peak_action} ({_said(plan, replay.peak_action)})."
        )
    # `not <=` instead of `>`, which would let NaN pass.
    if not abs(replay.seconds - plan.seconds) <= SECONDS_TOLERANCE * max(1e-9, replay.seconds):
        raise PlanError(
            f"seconds: the plan says {plan.seconds!r}, the replay took {replay.seconds!r}."
        )
    if not plan.lower_bound_seconds <= replay.seconds * (1 + SECONDS_TOLERANCE):
        raise PlanError(
            f"lower_bound_seconds: the plan says {plan.lower_bound_seconds!r}, but the replay took "
            f"only {replay.seconds!r}."
        )
    return replay


def carry_out(graph: Graph, plan: Plan) -> Replay:
    """Replay a plan, ignoring its predictions, e.g. if its graph has other op seconds by now.

    Raises PlanError for invalid actions.
    """
    return _Replayer(graph, plan).result()


def _said(plan: Plan, at: int) -> str:
    return f"{plan.actions[at].kind} {plan.actions[at].target}" if plan.actions else "no actions"


class _Replayer:
    """The state of one replay; `result` runs the actions."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan, self.arrays = graph, plan, graph.arrays
        self.sizes: list[int] = self.arrays.bytes.tolist()
        residents = np.flatnonzero(self.arrays.resident).tolist()
        # On the device, by storage: its version, when its bytes can be read, and the action that
        # freed it last.
        self.version: dict[int, int] = dict.fromkeys(residents, 0)
        self.ready: dict[int, float] = {}
        self.gone: dict[int, int] = {}
        # On the host, by storage: version, and when the copy is complete; for storages still on the
        # device, until when their bytes are being copied out.
        self.host: dict[int, tuple[int, float]] = {}
        self.leaving: dict[int, float] = {}
        self.live = graph.base_bytes
        self.host_bytes = self.host_peak = 0
        self.compute = self.up = self.down = 0.0
        self.ran = [False] * len(graph.ops)
        self.order: list[int] = []
        self.reruns = 0
        self.at = 0

    def fail(self, problem: str) -> PlanError:
        return PlanError(f"action {self.at} ({_said(self.plan, self.at)}): {problem}")

    def result(self) -> Replay:
        count = len(self.plan.actions)
        live, start, end = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
        ops, storages = self.graph.op_index, self.graph.storage_index
        methods = {"free": self.free, "offload": self.offload, "prefetch": self.prefetch}
        for at, (kind, target, way) in enumerate(self.plan.actions):
            self.at = at
            if kind == "run":
                if target not in ops:
                    raise self.fail("the graph has no op of this name.")
                live[at], start[at], end[at] = self.run(ops[target], way)
                continue
            if kind not in methods:
                raise self.fail(f"expected run, {', '.join(methods)}.")
            if target not in storages:
                raise self.fail("the graph has no storage of this name.")
            if self.arrays.resident[storages[target]]:
                raise self.fail("it is resident; plans leave resident storages where they are.")
            if kind == "offload" and self.arrays.held[storages[target]]:
                raise self.fail("it is referenced outside the step, so nothing would be freed.")
            live[at], start[at], end[at] = methods[kind](storages[target])
        self.finish()
        peak = int(live.max(initial=self.graph.base_bytes))
        return Replay(
            peak_bytes=peak,
            # The first of several, as `argmax` returns it.
            peak_action=int(live.argmax()) if count else 0,
            seconds=self.compute,
            host_peak_bytes=self.host_peak,
            live_bytes=live,
            start_s=start,
            end_s=end,
            reruns=self.reruns,
        )

    def run(self, op: int, way: int) -> tuple[int, float, float]:
        arrays, names = self.arrays, self.graph.storages
        if way >= len(arrays.seconds[op]):
            raise self.fail(f"got way {way}; the op has {len(arrays.seconds[op])} ways.")
        start = self.compute
        for storage, wanted in zip(arrays.reads[op], arrays.version[op], strict=True):
            name = names[storage].name
            if storage not in self.version:
                raise self.fail(f"needs {name!r}, {self.whereabouts(storage)}.")
            if self.version[storage] != wanted:
                raise self.fail(
                    f"needs {name!r} after {wanted} in-place writes; it has had "
                    f"{self.version[storage]}."
                )
            start = max(start, self.ready.get(storage, 0.0))
        for storage in arrays.writes[op]:
            if storage in self.host:
                raise self.fail(f"changes {names[storage].name!r}; its host copy would be stale.")
        self.first_or_again(op)
        duplicates = 0
        for storage in arrays.outputs[op]:
            # An output that already exists is made a second time while the op runs.
            if storage in self.version or storage in self.host:
                duplicates += self.sizes[storage]
            else:
                self.version[storage] = 0
                self.live += self.sizes[storage]
        for storage in arrays.writes[op]:
            self.version[storage] += 1
        end = self.compute = start + arrays.seconds[op][way]
        for storage in (*arrays.outputs[op], *arrays.writes[op]):
            # This does not bring one that is on the host to the device.
            if storage in self.version and self.ready.get(storage, 0.0) < end:
                self.ready[storage] = end
        return self.live + duplicates + arrays.workspace_bytes[op][way], start, end

    def first_or_again(self, op: int) -> None:
        record = self.graph.ops[op]
        if self.ran[op]:
            self.reruns += 1
            if not record.repeatable:
                why = ["effect", "collective", "once", "random"]
                flags = ", ".join(flag for flag in why if getattr(record, flag))
                raise self.fail(f"runs again, but it may not run twice ({flags}).")
            return
        self.ran[op] = True
        self.order.append(op)

    def whereabouts(self, storage: int) -> str:
        if storage in self.host:
            return "which is on the host: prefetch it first"
        if storage in self.gone:
            return f"which action {self.gone[storage]} freed"
        return "which no action has made yet"

    def present(self, storage: int) -> None:
        if storage not in self.version:
            raise self.fail(f"acts on a storage {self.whereabouts(storage)}.")

    def free(self, storage: int) -> tuple[int, float, float]:
        self.present(storage)
        before = self.live
        self.live -= self.sizes[storage]
        del self.version[storage]
        self.gone[storage] = self.at
        # The memory is reused on the compute lane, so that lane waits.
        moment = max(self.compute, self.leaving.pop(storage, 0.0), self.ready.pop(storage, 0.0))
        self.compute = moment
        return before, moment, moment

    def offload(self, storage: int) -> tuple[int, float, float]:
        self.present(storage)
        device = self.graph.device
        if device.to_host_bytes_per_s is None or not device.can_offload:
            raise self.fail("the graph's device states no transfer speeds.")
        if storage in self.host:
            raise self.fail("it has a host copy already.")
        start = max(self.down, self.ready.get(storage, 0.0))
        # A copy cannot start before the ops that come first in the plan have ended.
        start = max(start, self.compute)
        # Not `Device.to_host_s`: judge and planner share no arithmetic.
        wire = self.sizes[storage] / device.to_host_bytes_per_s
        self.down = start + device.transfer_latency_s + wire
        self.host[storage] = (self.version[storage], self.down)
        self.leaving[storage] = self.down
        self.host_bytes += self.sizes[storage]
        self.host_peak = max(self.host_peak, self.host_bytes)
        if device.pinned_bytes is not None and self.host_bytes > device.pinned_bytes:
            raise self.fail(
                f"{self.host_bytes} bytes are on the host, device.pinned_bytes is "
                f"{device.pinned_bytes}."
            )
        return self.live, start, self.down

    def prefetch(self, storage: int) -> tuple[int, float, float]:
        device = self.graph.device
        if storage not in self.host or device.to_device_bytes_per_s is None:
            raise self.fail(f"has no host copy: {self.whereabouts(storage)}.")
        if storage in self.version:
            raise self.fail("it is on the device already; free it first.")
        # Host memory is free as soon as the copy back starts.
        self.version[storage], copied = self.host.pop(storage)
        start = max(self.up, copied, self.compute)
        wire = self.sizes[storage] / device.to_device_bytes_per_s
        self.up = start + device.transfer_latency_s + wire
        self.ready[storage] = self.up
        self.live += self.sizes[storage]
        self.host_bytes -= self.sizes[storage]
        return self.live, start, self.up

    def finish(self) -> None:
        graph, arrays = self.graph, self.arrays
        for op, ran in enumerate(self.ran):
            if not ran:
                raise PlanError(f"actions: the op {graph.ops[op].name!r} is never run.")
        self.check_order()
        # Whatever was rebuilt, what is left has to be the last version.
        writes = Counter(storage for written in arrays.writes for storage in written)
        for storage in np.flatnonzero(arrays.keep | arrays.resident).tolist():
            name = graph.storages[storage].name
            if storage not in self.version:
                raise PlanError(
                    f"actions: {name!r} must be on the device at the end, "
                    f"{self.whereabouts(storage)}."
                )
            if self.version[storage] != writes[storage]:
                raise PlanError(
                    f"actions: {name!r} has had {self.version[storage]} of {writes[storage]} "
                    "in-place writes at the end."
                )
        # A kept storage that is still on its way is not there yet.
        self.compute = max(self.compute, max(self.ready.values(), default=0.0))

    def check_order(self) -> None:
        """First runs may change places, except those with an order of their own."""
        ops = self.graph.ops
        ordered = [op for op in self.order if ops[op].ordered]
        for before, after in itertools.pairwise(ordered):
            if before > after:
                raise PlanError(
                    f"actions: {ops[before].name!r} first runs before {ops[after].name!r}; "
                    "both keep the order of the graph (random, effect, collective or fixed)."
                )
        ahead = -1
        for place, op in enumerate(self.order):
            # With all ops before it done and none after it, op number n is the n-th first run.
            if ops[op].fixed and (place != op or ahead > op):
                raise PlanError(f"actions: {ops[op].name!r} is fixed, but other ops moved past it.")
            ahead = max(ahead, op)


def check_packing(
    buffers: Sequence[Sequence[int]], offsets: Sequence[int], capacity: int | None = None
) -> int:
    """Return the height of a packing.

    Parameters
    ----------
    buffers
        Rows of (lower, upper, size) or (lower, upper, size, alignment).
    offsets
        One for each of them.
    capacity
        Bytes that no buffer may end above.

    Raises
    ------
    PackError
        Naming the first violation: a missing offset, one below zero or off its alignment, an end
        above the capacity, or the two buffers that overlap.
    """
    if len(offsets) != len(buffers):
        raise PackError(f"got {len(offsets)} offsets, expected {len(buffers)}: one per buffer.")
    height = 0
    events = []
    for at, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        lower, upper, size = buffer[:3]
        alignment = buffer[3] if len(buffer) > 3 else 1
        if lower >= upper or size < 0 or alignment < 1:
            raise PackError(
                f"buffer {at}: got {tuple(buffer)}, expected lower < upper, a size of 0 or more "
                "and an alignment of 1 or more."
            )
        if offset < 0 or offset % alignment:
            raise PackError(
                f"buffer {at}: got offset {offset}, expected a multiple of {alignment}, 0 or more."
            )
        if capacity is not None and offset + size > capacity:
            raise PackError(
                f"buffer {at}: ends at {offset + size}, above the capacity of {capacity}."
            )
        height = max(height, offset + size)
        if size:
            # Lifetimes are half-open: at one moment, ends come before starts.
            events += [(lower, 1, at), (upper, 0, at)]
    alive: list[tuple[int, int, int]] = []
    for moment, starts, at in sorted(events):
        span = (offsets[at], offsets[at] + buffers[at][2], at)
        place = bisect_left(alive, span)
        if not starts:
            del alive[place]
            continue
        # Those alive do not overlap, so only the next one on each side can be met.
        for other in alive[max(place - 1, 0) : place + 1]:
            if other[0] < span[1] and span[0] < other[1]:
                raise PackError(
                    f"buffers {other[2]} and {at} are both alive at {moment} and overlap: "
                    f"bytes [{other[0]}, {other[1]}) and [{span[0]}, {span[1]})."
                )
        insort(alive, span)
    return height
