"""Compressed weights: sends differences to what a partner already has.

A codec that drops most of a vector is useless for weights: what it drops is lost. But the
difference to the partner's copy is small, and goes to zero if it is sent repeatedly. So both ends
of every directed pair keep the same copy of the sender's weights, and add each decoded payload to
it; what a payload drops is part of the next difference, which makes it error feedback for free
(CHOCO-SGD: Koloskova, Stich, Jaggi 2019). In a topology where a rank has log2(ranks) targets and as
many sources, that takes two copies of the model per partner, on the host, once it is used. All
copies start as the weights that all ranks had at the last exact average.

The spread, the distance of the ranks from their mean, is estimated from a few numbers that are
summed over the ranks; computed exactly it would need a sum of the whole model. Each rank reduces
its weights to a sketch of WIDTH numbers: rows of WIDTH elements are added with random signs, the
same on all ranks. This is linear, and the expected squared norm of a vector's sketch is that of the
vector (the tug-of-war sketch of Alon, Matias and Szegedy 1996, with WIDTH copies that share signs).
So the deviations of the sketches from their mean over the ranks have the norm of the deviations of
the weights, up to a standard deviation of 1 / sqrt(2 WIDTH), 4 %, if rows deviate independently.
Partners' copies are not used for this: with a codec they lag behind, and are closer to each other
than the ranks are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codecs.base import Bytes, Codec, Floats, Payload
from ..errors import CompressError, PayloadError
from ..saved import count, floats, held, reading

SMALLEST = 1024  # elements; smaller tensors are not compressed
# Factor on the mixing weight; Koloskova et al. 2019 call it the consensus step size. Copies lag
# behind, so at full mixing weight the ranks oscillate and diverge: with 2 % of the values in a
# message, 0.3 and more diverges, however small the learning rate. About 5 times the fraction kept.
PULL = 0.1
Copies = tuple[Floats | None, dict[int, Floats], dict[int, Floats]]  # base, sent, heard
_FORMAT = 1

Shape = tuple[int, ...]


class Differences:
    """The copies of a bucket of tensors, concatenated in a vector of n elements.

    Parameters
    ----------
    shapes : of the tensors, in the order of the vector
    codec : for the differences of tensors of SMALLEST elements or more; or a function from a shape
        to a codec. Settings and shapes must be the same on all ranks.
    """

    def __init__(self, shapes: Sequence[Shape], codec: Codec | Callable[[Shape], Codec]) -> None:
        self.sizes = [prod(shape) for shape in shapes]
        self.n = sum(self.sizes)
        make = (lambda shape: codec) if isinstance(codec, Codec) else codec
        self.codecs = [
            make(shape) if size >= SMALLEST else None
            for shape, size in zip(shapes, self.sizes, strict=True)
        ]
        self.base: Floats | None = None
        self._sent: dict[int, Floats] = {}  # by target: its copy of this rank's weights
        self._heard: dict[int, Floats] = {}  # by source: this rank's copy of its weights

    @property
    def wire_bytes(self) -> int:
        """Number of bytes of a message, the same at every step."""
        return sum(
            4 * size if codec is None else codec.payload_bytes(size)
            for size, codec in zip(self.sizes, self.codecs, strict=True)
        )

    def restart(self, values: Floats | None) -> None:
        """Reset all copies to these values, [n] float32, equal on all ranks; None: set later."""
        self.base = None if values is None else values.copy()
        self._sent.clear()
        self._heard.clear()

    def sent_to(self, target: int) -> Floats:
        """Return the target's copy of this rank's weights, [n] float32."""
        return self._of(self._sent, target)

    def heard(self, source: int) -> Floats:
        """Return this rank's copy of the source's weights, [n] float32."""
        return self._of(self._heard, source)

    def _of(self, copies: dict[int, Floats], rank: int) -> Floats:
        if self.base is None:
            raise CompressError(
                "there are no weights to take differences from; expected restart(values) first, "
                "with weights that all ranks hold"
            )
        if rank not in copies:
            copies[rank] = self.base.copy()
        return copies[rank]

    def begin(self, values: Floats, target: int, rank: int) -> tuple[Bytes, Floats]:
        """Return the message of a step, and the target's copy of this rank's values after it.

        For an idle rank, these are an empty message and the values themselves. The first values
        passed must be equal on all ranks.
        """
        if self.base is None:
            self.restart(values)
        # An idle rank has no copy of itself, and mixes in its own values.
        if target == rank:
            return np.empty(0, np.uint8), values
        return self.pack(values, target), self.sent_to(target)

    def pack(self, values: Floats, target: int) -> Bytes:
        """Return the message to `target` that moves its copy towards `values`, [n] float32.

        NaN and Inf are sent, so that the target learns of them, but do not enter copies.
        """
        copy = self.sent_to(target)
        parts: list[Bytes] = []
        for stretch, codec in self._stretches():
            if codec is None:
                parts.append(values[stretch].view(np.uint8))
                _replace(copy[stretch], values[stretch])
            else:
                # No codec state: what this payload drops is in the next difference. The copy is
                # updated with the decoded values, as is the target's.
                payload = codec.encode(values[stretch] - copy[stretch])
                _replace(copy[stretch], copy[stretch] + codec.decode(payload))
                parts.append(payload.buffer)
        return np.concatenate(parts)

    def unpack(self, wire: Bytes, source: int) -> Floats:
        """Return the weights of `source` after its message, [n] float32.

        Raises PayloadError if the bytes are not a message of the same tensors and codecs.
        """
        if wire.size != self.wire_bytes:
            raise PayloadError(
                f"rank {source} sent {wire.size} bytes; expected {self.wire_bytes}. Do all ranks "
                "run the same version with the same codec?"
            )
        copy = self.heard(source)
        values, start = np.empty_like(copy), 0
        for stretch, codec in self._stretches():
            size = stretch.stop - stretch.start
            if codec is None:
                part = wire[start : start + 4 * size]
                values[stretch] = np.frombuffer(part.tobytes(), np.float32)
            else:
                part = wire[start : start + codec.payload_bytes(size)]
                try:
                    payload = Payload.from_bytes(part, n=size)
                except PayloadError as error:
                    raise PayloadError(f"from rank {source}: {error}") from error
                # The same sum as on the sender, in the same order, so that copies are bit-equal.
                values[stretch] = copy[stretch] + codec.decode(payload)
            start += part.size
            _replace(copy[stretch], values[stretch])
        return values

    def _stretches(self) -> list[tuple[slice, Codec | None]]:
        ends = np.cumsum(self.sizes).tolist()
        return [
            (slice(end - size, end), codec)
            for end, size, codec in zip(ends, self.sizes, self.codecs, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the copies, as arrays by rank."""
        return {
            "format": _FORMAT,
            "base": None if self.base is None else self.base.copy(),
            "told": {rank: copy.copy() for rank, copy in self._sent.items()},
            "heard": {rank: copy.copy() for rank, copy in self._heard.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved copies; CompressError, and no change, if they are of other tensors."""
        self.take(self.read(state))

    def read(self, state: dict[str, Any]) -> Copies:
        """Check saved copies and return them for `take`; nothing changes."""
        with reading("saved copies"):
            held(state)
            if state.get("format") != _FORMAT:
                raise CompressError(
                    f"saved differences of format {state.get('format')!r}; expected {_FORMAT}"
                )
            base = None if state["base"] is None else _vector(state["base"], self.n)
            sent, heard = (
                {count(rank, "rank"): _vector(copy, self.n) for rank, copy in state[key].items()}
                for key in ("told", "heard")
            )
            # Copies created later start from the base; without it, the two ends would start from
            # different weights.
            if base is None and (sent or heard):
                raise CompressError(
                    "saved copies lack the weights that they started from; expected what "
                    "state_dict() returned, unchanged"
                )
        return base, sent, heard

    def take(self, copies: Copies) -> None:
        """Continue with what `read` returned."""
        self.base, self._sent, self._heard = copies


def _replace(copy: Floats, values: npt.NDArray[Any]) -> None:
    """Update a copy in place, unless with NaN or Inf: the copy would stay NaN forever."""
    if np.isfinite(values).all():
        copy[:] = values


def _vector(saved: Any, n: int) -> Floats:
    array = np.asarray(saved)
    if array.shape != (n,):
        raise CompressError(
            f"a saved copy has shape {array.shape}; expected ({n},). Load what was saved for this "
            "model and bucket_bytes, or call consensus() to begin anew."
        )
    return floats(array, "copy", (n,))


WIDTH = 256  # numbers in a sketch: a standard deviation of 4 % for a message of 2 KiB
_SEED = 0  # shared by all ranks


def signs(rows: int) -> Floats:
    """Return +1 or -1 for each row of WIDTH elements, [rows] float32, the same on all ranks."""
    return np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), rows)


def rows_of(n: int) -> int:
    """Return the number of rows for n elements, the last one padded with zeros."""
    return -(-n // WIDTH)


def spread(total: npt.NDArray[np.float64], ranks: int) -> float:
    """Return the root mean square distance to the mean over the root mean square norm.

    total : [WIDTH + 2] the sum over the ranks of their sketches, of the squared norm of the
        sketches, and of the squared norm of the weights
    """
    numbers, squares, norms = total[:-2], float(total[-2]), float(total[-1])
    # If ranks are equal, rounding could make it negative.
    squared_distance = max(squares - float(numbers @ numbers) / ranks, 0.0)
    return math.sqrt(squared_distance / norms) if norms else 0.0
