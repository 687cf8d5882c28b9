"""Results of estimates: bytes of a step, and the batch that fits a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ..base.errors import GraphError
from ..base.sizes import parse_bytes, show_bytes, table
from ..graph.graph import Graph
from ..graph.records import Op, Storage, Workspace
from ..plan.plan import BudgetError


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step as its framework runs it, without a plan.

    Parameters
    ----------
    parameters_bytes, buffers_bytes, inputs_bytes, gradients_bytes, optimizer_bytes
        Held between steps, or at their end. For a step function that updates, optimizer state is
        among the buffers: variables that are not trained.
    activations_bytes
        Saved by the forward pass for the backward pass, including outputs.
    step_bytes
        The peak of forward and backward, or of a whole step function, including the optimizer's
        state.
    update_bytes
        The peak of an optimizer's step if that is separate, else 0; including the batch, which the
        training loop holds.
    peak_op
        The op that reaches `step_bytes`: its name in the graph, or the framework's name if tensors
        live longer than in the graph.
    batch
        The size of the sample's first dimension; None if its tensors differ in it.
    logits_bytes
        The part of the activations that is as large as the input of the loss's log-softmax.
    device
        The named device that the estimate is for; empty for the present one.
    room_bytes
        What torch's allocator can use there: everything except the driver's context.
    workspace_bytes
        The part of the peak that libraries keep from their first call on.
    reserved_bytes
        What a card's allocator reserves for the step, by its rules; 0 if none is modelled.
    pinned_bytes
        Page-locked host memory: 0 without a plan that offloads.
    seconds
        Of a step with its update, predicted from the device's speeds, not measured.
    notes
        What is approximated, or counted differently from how the device would run it.
    """

    parameters_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    step_bytes: int
    update_bytes: int
    peak_op: str
    batch: int | None
    _step_of: Callable[[int], int] = field(repr=False, compare=False)
    logits_bytes: int = 0
    device: str = ""
    room_bytes: int | None = None
    workspace_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at any time."""
        return max(self.step_bytes, self.update_bytes)

    def fits(self, size: float | str | None = None) -> bool:
        """Whether the step fits into `size`, a number of bytes or text such as "12GiB".

        None means the capacity of the named device.
        """
        return self.peak_bytes <= self._room(size)

    def largest_batch(self, size: float | str | None = None) -> int:
        """Return the largest batch whose step fits, without a plan; traces a few batches.

        size : as in `fits`

        Raises BudgetError if not even one sample fits, and ValueError if the sample has no batch.
        """
        if self.batch is None:
            raise ValueError(
                "the sample's tensors differ in their first dimension, so the batch is not known. "
                "Estimate samples of several sizes instead."
            )
        room = self._room(size)
        one = self._step_of(1)
        if one > room:
            raise BudgetError(
                f"a batch of 1 needs {show_bytes(one)}; there are "
                f"{show_bytes(room)}. Make the model or the input smaller, or plan it.",
                peak_bytes=one,
                budget_bytes=room,
                op=self.peak_op,
            )
        return _largest(self._step_of, room, one)

    def _room(self, size: float | str | None) -> int:
        if size is not None:
            return parse_bytes(size)
        if self.room_bytes is None:
            raise ValueError(
                'got no size, and no device was named: pass one such as "12GiB", or estimate with '
                'device="h100".'
            )
        return self.room_bytes

    def __str__(self) -> str:
        sizes = {
            "parameters": self.parameters_bytes,
            "buffers": self.buffers_bytes,
            "input": self.inputs_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
        }
        if self.logits_bytes:
            sizes["of which logits"] = self.logits_bytes
        sizes["allocated" if self.device else "peak"] = self.peak_bytes
        if self.device and self.reserved_bytes:
            sizes["reserved"] = self.reserved_bytes
        if self.device:
            sizes["pinned"] = self.pinned_bytes
        rows = [(name, show_bytes(size)) for name, size in sizes.items()]
        if self.seconds is not None:
            rows.append(("seconds, predicted", f"{self.seconds:.3g}"))
        return "\n".join([*table(rows, right=True), *(f"note: {note}" for note in self.notes)])


def _largest(step_of: Callable[[int], int], room: int, one: int) -> int:
    """Return the largest batch whose step fits; a batch of 1 takes `one` bytes.

    Peaks grow almost linearly, so a straight line tells where to look; bisection makes sure.
    """
    # Two (batch, bytes) for the first line: `low` fits, and `high` is raised until it does not.
    low, high = (1, one), (2, step_of(2))
    while high[1] <= room:
        grows = max(1, (high[1] - low[1]) // (high[0] - low[0]))
        low, batch = high, high[0] + (room - high[1]) // grows + 1
        high = batch, step_of(batch)
    by_line = True
    while high[0] - low[0] > 1:
        batch = (low[0] + high[0]) // 2
        # On a curve one end may never move, so every other guess is the middle.
        if by_line:
            guess = low[0] + (room - low[1]) * (high[0] - low[0]) // max(1, high[1] - low[1])
            batch = min(max(guess, low[0] + 1), high[0] - 1)
        by_line = not by_line
        probe = batch, step_of(batch)
        low, high = (probe, high) if probe[1] <= room else (low, probe)
    return low[0]


class Batches:
    """The graphs of a step at any batch, interpolated from traces at two batches.

    Sizes, FLOPs, traffic and measured seconds are affine in the batch as long as the step makes the
    same calls. So a step need not be traced again for each batch.

    Parameters
    ----------
    first, second
        A batch and its graph, with the same names of ops and storages; the second batch is the
        larger one, and its order of ops is used.

    Raises
    ------
    GraphError
        If the two are not the same step.
    """

    def __init__(self, first: tuple[int, Graph], second: tuple[int, Graph]) -> None:
        (self._few, small), (self._many, self._graph) = first, second
        if self._few >= self._many:
            raise GraphError(f"got batches {self._few} and {self._many}, expected a larger second.")
        self._ops = {op.name: op for op in small.ops}
        self._storages = {storage.name: storage for storage in small.storages}
        other = {op.name: op for op in self._graph.ops}
        # Two steps that make different calls cannot be interpolated.
        differing = self._ops.keys() ^ other.keys() or [
            name
            for name, op in other.items()
            if (op.inputs, op.outputs) != (self._ops[name].inputs, self._ops[name].outputs)
        ]
        if differing or self._storages.keys() != {storage.name for storage in self._graph.storages}:
            raise GraphError(
                f"the step at a batch of {self._few} is not the one at {self._many}"
                + (f": it differs in {min(differing)}." if differing else ".")
            )

    def at(self, batch: int) -> Graph:
        """Return the graph at a batch of 1 or more."""

        def between(few: float, many: float) -> float:
            # Below the smaller batch the line may become negative.
            line = few + (many - few) * (batch - self._few) / (self._many - self._few)
            return max(0.0, line)

        def size(few: int, many: int) -> int:
            return round(between(few, many))

        def seconds(few: float | None, many: float | None) -> float | None:
            # Without two measurements, take the value of the larger batch.
            return many if few is None or many is None else between(few, many)

        def op_at(op: Op) -> Op:
            few = self._ops[op.name]
            # Kernels available at only one of the batches are dropped.
            ways = tuple(
                Workspace(size(a.bytes, b.bytes), seconds(a.seconds, b.seconds), b.name)
                for a, b in zip(few.workspaces, op.workspaces, strict=False)
            )
            traffic = seconds(few.traffic_bytes, op.traffic_bytes)
            return replace(
                op,
                flops=between(few.flops, op.flops),
                seconds=seconds(few.seconds, op.seconds),
                traffic_bytes=None if traffic is None else round(traffic),
                workspaces=ways,
            )

        def storage_at(storage: Storage) -> Storage:
            return replace(storage, bytes=size(self._storages[storage.name].bytes, storage.bytes))

        return replace(
            self._graph,
            storages=tuple(storage_at(storage) for storage in self._graph.storages),
            ops=tuple(op_at(op) for op in self._graph.ops),
        )


PLAIN = "plain"


@dataclass(frozen=True)
class Way:
    """One way to train, at the largest batch that fits.

    Parameters
    ----------
    name
        As `plain`, `plan, +10 % time`, `4 cards`.
    batch
        Per card; 0 where not even one sample fits.
    seconds, samples_per_s, tokens_per_s
        Of a step with its update, on all cards together; predicted.
    allocated_bytes, reserved_bytes, pinned_bytes
        On one card, as torch's allocator counts; the last on the host. None if not modelled.
    bytes
        Allocated bytes by category.
    note
        Why there is no result, or what it leaves out.
    """

    name: str
    batch: int
    cards: int = 1
    seconds: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    pinned_bytes: int | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Fit:
    """All ways to train at one sequence length.

    device, room_bytes : its name, and what torch's allocator can use there
    length : of the sequence; None if the sample has its own
    most : the largest batch that was tried
    notes : what is approximated or left out
    """

    device: str
    room_bytes: int
    length: int | None
    most: int
    ways: tuple[Way, ...]
    notes: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return the result as JSON-compatible data."""
        data = asdict(self)
        return {"sequence" if key == "length" else key: value for key, value in data.items()}

    def shown_batch(self, way: Way) -> str:
        """The largest batch of a way as text; with a plus if no larger one was tried."""
        return f"{way.batch}{'+' if way.batch == self.most else ''}" if way.batch else "none"

    def __str__(self) -> str:
        head = f"{self.device}, room {show_bytes(self.room_bytes)}"
        if self.length is not None:
            head += f", sequence {self.length}"
        per = "tokens/s" if any(way.tokens_per_s for way in self.ways) else "samples/s"
        rows: list[tuple[str, ...]] = [
            ("way", "batch", "step, s", per, "allocated", "reserved", "pinned")
        ]
        for way in self.ways:
            rate = way.tokens_per_s if per == "tokens/s" else way.samples_per_s
            sizes = (way.allocated_bytes, way.reserved_bytes, way.pinned_bytes)
            rows.append(
                (
                    way.name,
                    self.shown_batch(way),
                    "" if way.seconds is None else f"{way.seconds:.3g}",
                    "" if rate is None else f"{rate:,.0f}",
                    *("" if size is None else show_bytes(size) for size in sizes),
                )
            )
        lines = [head, *table(rows, right=True)]
        # The table has only totals; their parts are shown for the plain step.
        plain = self.ways[0]
        held = ", ".join(f"{name} {show_bytes(size)}" for name, size in plain.bytes.items() if size)
        if held:
            lines.append(f"{plain.name} holds: {held}")
        notes = [f"{way.name}: {way.note}" for way in self.ways if way.note] + list(self.notes)
        return "\n".join(lines + [f"note: {note}" for note in dict.fromkeys(notes)])


def categories(estimate: Estimate) -> dict[str, int]:
    """Bytes of an estimate's peak by category; the rest is `other`."""
    held = {
        "parameters": estimate.parameters_bytes,
        "gradients": estimate.gradients_bytes,
        "optimizer": estimate.optimizer_bytes,
        "activations": estimate.activations_bytes - estimate.logits_bytes,
        "logits": estimate.logits_bytes,
        "buffers and input": estimate.buffers_bytes + estimate.inputs_bytes,
        "workspace": estimate.workspace_bytes,
    }
    # At the peak, some activations are already freed, and some gradients do not exist yet.
    over = sum(held.values()) - estimate.peak_bytes
    if over > 0:
        held["gradients"] = max(0, held["gradients"] - over)
    other = estimate.peak_bytes - sum(held.values())
    return {**held, "other": other} if other > 0 else held


def largest(fits: Callable[[int], bool], least: int, most: int, start: int = 0) -> int:
    """Return the largest batch from `least` to `most` that fits, to a thirtieth; 0 if none does.

    start : a batch that is known to fit, to begin at
    """
    low = start
    if low <= 0:
        if not fits(least):
            return 0
        low = least
    # Double until one does not fit, as only `most` bounds the result from above.
    high = min(2 * low, most)
    while low < most and fits(high):
        low, high = high, min(2 * high, most)
    if low >= most:
        return most
    # `low` fits, `high` does not. Only to a thirtieth, as each batch tried may take a search.
    while high - low > max(1, low // 30):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class Units(NamedTuple):
    """Bytes of parameters by FSDP unit: the largest block, and those outside of blocks."""

    block_bytes: int
    root_bytes: int


@dataclass(frozen=True)
class Held:
    """Bytes on one card.

    parameters_bytes, gradients_bytes, optimizer_bytes : its shard of each
    gathered_bytes : unsharded parameters of units gathered together, and the gradients of one
    rest_bytes : the peak of everything else: buffers, input, activations, workspaces
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    rest_bytes: int

    @property
    def state_bytes(self) -> int:
        """The shards of parameters, gradients and optimizer state."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """The sum, an upper bound of what the step needs at any time."""
        return self.state_bytes + self.gathered_bytes + self.rest_bytes


def on_cards(
    cards: int,
    *,
    parameters_bytes: int,
    gradients_bytes: int,
    optimizer_bytes: int,
    rest_bytes: int,
    units: Units,
) -> Held:
    """Return the bytes on each of `cards` cards when a step is sharded by FSDP2 (`fully_shard`).

    Parameters, gradients and the optimizer's state are sharded over all cards in equal parts. Each
    block of the model is a unit, and the rest is the root unit, which stays gathered from its first
    use on; while a block runs, the next one is gathered too. A gradient is unsharded until it is
    reduced. On a single card nothing is gathered.
    """
    if cards < 1:
        raise ValueError(f"got {cards} cards, expected 1 or more.")

    def part(size: int) -> int:
        # Shards are padded to equal size.
        return -(-size // cards)

    # Parameters of the root, the running block and the next one, and one unsharded gradient.
    gathered = 2 * units.block_bytes + units.root_bytes + max(units.block_bytes, units.root_bytes)
    return Held(
        part(parameters_bytes),
        part(gradients_bytes),
        part(optimizer_bytes),
        gathered if cards > 1 else 0,
        rest_bytes,
    )
