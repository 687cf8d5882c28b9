"""Statistics of what a rank has sent, counted from the actual payloads."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .codecs.base import Payload

_log = logging.getLogger(__name__)
METHODS = ("low_rank", "rows", "frequencies", "whole", "cast", "plain")


@dataclass(frozen=True)
class TensorTraffic:
    """What a TensorFlow graph sent for one tensor in each of `steps` steps.

    dense, sent : bytes
    """

    name: str
    elements: int
    dense: int
    sent: int
    method: str
    steps: int


@dataclass(frozen=True)
class PayloadStats:
    """Statistics of one tensor's payloads (see Payload); None where unknown."""

    nbytes: int
    saturated: int
    energy: float | None
    error: float | None
    method: str = "frequencies"  # of METHODS

    @classmethod
    def of(cls, payloads: Sequence[Payload]) -> PayloadStats:
        """Sum the statistics of at least one payload."""
        energies, errors = (
            [getattr(payload, name) for payload in payloads] for name in ("energy", "error")
        )
        return cls(
            sum(payload.nbytes for payload in payloads),
            sum(payload.saturated for payload in payloads),
            None if None in energies else math.fsum(energies),
            None if None in errors else math.fsum(errors),
        )


@dataclass
class _Sums:
    """Bytes of some steps, dense and as sent, and whether anything in them was compressed."""

    steps: int = 0
    dense: int = 0
    sent: int = 0
    compressed: bool = False

    def add(self, other: _Sums) -> None:
        """Add steps in which something was compressed; ignore others."""
        if other.compressed:
            self.steps += other.steps
            self.dense += other.dense
            self.sent += other.sent
            self.compressed = True


class Traffic:
    """Bytes per step and the relative error, kept per optimizer.

    A step ends when a tensor name repeats: names are the only clock `compress` has. A rim that
    knows when a step begins calls `new_step`, because with two alternating models no name repeats.
    """

    def __init__(self) -> None:
        self._compressed: dict[str, int] = {}  # elements of tensors compressed when last sent
        self._fixed: dict[str, tuple[int, int]] = {}  # elements and bytes, the same in every step
        self._sent: set[str] = set()  # names sent in the open step
        self._steps = 0
        self._dense_sum = self._sent_sum = 0  # bytes over all steps
        self._now = _Sums()  # of the open step
        self._settled = _Sums()  # of all closed steps in which something was compressed
        self._energy = self._error = 0.0
        self._relative_sum, self._relative_count = 0.0, 0
        self._saturated = 0
        self._overhead = 0
        self._methods: dict[str, str] = {}  # how each tensor travels: one of METHODS
        self._logged = ""
        self.logs = True  # whether this rank logs the methods; rims leave it to rank 0

    def plain(self, name: str | None, elements: int, nbytes: int) -> None:
        """Count a tensor that travels uncompressed."""
        self._count(name, elements, nbytes, compressed=False)
        self._methods[name or ""] = "plain"

    def dense(self, name: str, elements: int, nbytes: int) -> None:
        """Count a tensor that was sent dense in this step only."""
        self._count(name, elements, nbytes, compressed=False)
        self._methods.setdefault(name, "plain")

    def sparse(self, name: str, elements: int, nbytes: int) -> None:
        """Count a sparse gradient of `elements` values, sent with their indices."""
        self._count(name, elements, nbytes, compressed=False, dense=nbytes)
        self._methods[name] = "plain"

    def fixed(self, name: str, elements: int, nbytes: int) -> None:
        """Register a tensor that travels uncompressed in every step of a traced function."""
        # Added in `report`: none of our Python runs in these steps, so nothing could count it.
        self._methods[name] = "plain"
        self._fixed[name] = elements, nbytes

    def overhead(self, nbytes: int) -> None:
        """Count bytes other than gradients: agreement, parameter comparison, measurements."""
        self._overhead += nbytes

    def ran(
        self,
        steps: int,
        tensors: Sequence[TensorTraffic],
        relative: tuple[float, float],
        saturated: int = 0,
    ) -> bool:
        """Count steps that a graph has run by itself; True if values saturated for the first time.

        steps : how many of them nothing else has counted
        relative : the sum of their relative errors, and the number of steps summed
        saturated : number of values that were clipped
        """
        if not any(tensor.steps for tensor in tensors):
            return False
        first = saturated > 0 and self._saturated == 0
        self._saturated += saturated
        self._close_step()
        self._sent.clear()
        self._steps += steps
        self._settled.add(
            _Sums(
                steps,
                sum(tensor.steps * tensor.dense for tensor in tensors),
                sum(tensor.steps * tensor.sent for tensor in tensors),
                any(tensor.method != "plain" for tensor in tensors),
            )
        )
        for tensor in tensors:
            self._dense_sum += tensor.steps * tensor.dense
            self._sent_sum += tensor.steps * tensor.sent
            self._note_compressed(tensor.name, tensor.elements, tensor.method != "plain")
            self._methods[tensor.name] = tensor.method
        self._relative_sum += relative[0]
        self._relative_count += round(relative[1])
        return first

    def new_step(self) -> None:
        """Begin a step with the next tensor counted."""
        self._sent.clear()

    @property
    def steps(self) -> int:
        """Steps counted so far."""
        return self._steps

    def payload(self, name: str | None, elements: int, stats: PayloadStats) -> bool:
        """Count the payloads of a tensor; True if values saturated for the first time."""
        self._count(name, elements, stats.nbytes, compressed=True)
        self._methods[name or ""] = stats.method
        if stats.energy is not None and stats.error is not None:
            self._energy += stats.energy
            self._error += stats.error
        first = stats.saturated > 0 and self._saturated == 0
        self._saturated += stats.saturated
        return first

    def shared(
        self, name: str, elements: int, nbytes: int, energy: float, error: float, *, method: str
    ) -> None:
        """Count what one tensor sends by one of METHODS, and its energy and error."""
        self._count(name, elements, nbytes, compressed=True)
        self._methods[name] = method
        self._energy += energy
        self._error += error

    def lost(self, energy: float, error: float) -> None:
        """Count energy and error of the previous step that the device had not computed in time."""
        self._energy += energy
        self._error += error

    def _count(
        self,
        name: str | None,
        elements: int,
        nbytes: int,
        *,
        compressed: bool,
        dense: int | None = None,
    ) -> None:
        key, dense = name or "", 4 * elements if dense is None else dense
        # A repeated name begins a step.
        if key in self._sent or not self._sent:
            self._close_step()
            self._say()
            self._steps += 1
            self._sent.clear()
        self._sent.add(key)
        self._dense_sum += dense
        self._sent_sum += nbytes
        self._now.dense += dense
        self._now.sent += nbytes
        self._now.compressed |= compressed
        self._note_compressed(key, elements, compressed)

    def _note_compressed(self, name: str, elements: int, compressed: bool) -> None:
        if compressed:
            self._compressed[name] = elements
        else:
            self._compressed.pop(name, None)

    def _close_step(self) -> None:
        # A step with NaN or Inf has no relative error.
        if self._energy > 0 and math.isfinite(self._energy):
            self._relative_sum += math.sqrt(self._error / self._energy)
            self._relative_count += 1
        self._energy = self._error = 0.0
        self._settled.add(self._now)
        self._now = _Sums(steps=1)

    def _counts(self) -> dict[str, int]:
        """Return the number of tensors by method."""
        count = Counter(self._methods.values())
        return {method: count[method] for method in METHODS}

    def _say(self) -> None:
        """Log the methods in one line after the first compressed step, and whenever they change.

        Called at the end of a step, because tensors are counted one by one.
        """
        counts = self._counts()
        line = ", ".join(f"{n} {method.replace('_', ' ')}" for method, n in counts.items() if n)
        if line == self._logged or not any(counts[m] for m in METHODS if m != "plain"):
            return
        self._logged = line
        if self.logs:
            _log.info("gradients travel as: %s", line)

    def report(self) -> dict[str, float]:
        """See Compression.report; all zeros before the first step."""
        relative_sum, count = self._relative_sum, self._relative_count
        if self._energy > 0 and math.isfinite(self._energy):  # the open step
            relative_sum, count = relative_sum + math.sqrt(self._error / self._energy), count + 1
        steps = max(self._steps, 1)
        fixed_dense = sum(4 * n for n, _ in self._fixed.values())
        fixed_sent = sum(nbytes for _, nbytes in self._fixed.values())
        dense = self._dense_sum / steps + fixed_dense
        sent = self._sent_sum / steps + fixed_sent
        settled = _Sums()
        settled.add(self._settled)
        settled.add(self._now)
        settled_sent = settled.sent + settled.steps * fixed_sent
        settled_dense = settled.dense + settled.steps * fixed_dense
        return {
            "steps": self._steps,
            "tensors": len(self._compressed),
            "elements": sum(self._compressed.values()),
            "dense_bytes": round(dense),
            "payload_bytes": round(sent),
            "ratio": dense / sent if sent else 0.0,
            "ratio_after_warmup": settled_dense / settled_sent if settled_sent else 0.0,
            "relative_error": relative_sum / count if count else 0.0,
            "saturated": self._saturated,
            "other_bytes": self._overhead,
            **self._counts(),
        }
