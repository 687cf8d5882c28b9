"""Weights in few bytes: what has changed since a partner was last told.

A codec that drops most of a vector is no use for weights: what it drops is lost. The difference to
what the partner already holds is small and, sent again and again, goes to zero. So both ends of
every directed pair keep the same copy of the sender's weights, and add to it what the payload says;
what a payload drops is part of the next difference, an error memory for nothing (CHOCO-SGD:
Koloskova, Stich, Jaggi 2019). A topology in which a rank has log2(ranks) targets and as many
sources costs two copies of the model for each, on the host, as soon as it is used. All copies begin
as the weights that all ranks held at the last exact average.

The spread, the distance of the ranks from their mean, is estimated from a few numbers that may be
summed over the ranks. Exact, it would need a sum of the whole model. Each rank instead makes WIDTH
numbers of its weights: rows of WIDTH elements are added with random signs, the same on all ranks.
That is linear, and the squared norm of a vector's numbers is on average that of the vector (the tug
of war of Alon, Matias and Szegedy 1996, with WIDTH copies that share signs). So the deviations of
the numbers from their mean over the ranks have the norm of the deviations of the weights, up to a
standard deviation of 1 / sqrt(2 WIDTH), 4 %, if rows deviate independently. What partners hold of
each other does not enter: with a codec their copies lag behind, and are nearer to each other than
the ranks.
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

SMALLEST = 1024  # elements; smaller tensors travel as they are
# Factor on the mixing weight; Koloskova et al. 2019 call it the consensus step size. Copies lag
# behind, so ranks that are pulled by them at full weight swing apart: with 2 % of the values in a
# message, 0.3 and more diverges, however small the learning rate. Some 5 times what is kept.
PULL = 0.1
Copies = tuple[Floats | None, dict[int, Floats], dict[int, Floats]]  # base, told, heard
_FORMAT = 1

Shape = tuple[int, ...]


class Differences:
    """The copies of one bucket of tensors, end to end in one vector of n elements.

    Parameters
    ----------
    shapes : of the tensors, in the order in which they lie in the vector
    codec : for the differences of tensors of SMALLEST elements or more; or a function from a shape
        to one. Settings and shapes must be the same on all ranks.
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
        self._sent: dict[int, Floats] = {}  # by target: what it holds of this rank
        self._heard: dict[int, Floats] = {}  # by source: what this rank holds of it

    @property
    def wire_bytes(self) -> int:
        """Bytes of a message, the same at every step."""
        return sum(
            4 * size if codec is None else codec.payload_bytes(size)
            for size, codec in zip(self.sizes, self.codecs, strict=True)
        )

    def restart(self, values: Floats | None) -> None:
        """Begin all copies as these values, [n] float32, that every rank holds; None: later."""
        self.base = None if values is None else values.copy()
        self._sent.clear()
        self._heard.clear()

    def sent_to(self, target: int) -> Floats:
        """Return the copy of this rank's weights that `target` holds, [n] float32."""
        return self._of(self._sent, target)

    def heard(self, source: int) -> Floats:
        """What this rank holds of `source`, [n] float32."""
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
        """The message of a step, and what the target takes this rank's values for.

        Both from copies; of a rank that sits out nothing, and the values as they are. The first
        values ever are those that all ranks hold.
        """
        if self.base is None:
            self.restart(values)
        # A rank that sits out keeps no copy of itself, and mixes its own values in as they are.
        if target == rank:
            return np.empty(0, np.uint8), values
        return self.pack(values, target), self.sent_to(target)

    def pack(self, values: Floats, target: int) -> Bytes:
        """The message to `target` that brings its copy nearer to `values`, [n] float32.

        NaN and Inf travel, so that the target learns of them, and enter no copy.
        """
        copy = self.sent_to(target)
        parts: list[Bytes] = []
        for stretch, codec in self._stretches():
            if codec is None:
                parts.append(values[stretch].view(np.uint8))
                _replace(copy[stretch], values[stretch])
            else:
                # Without a state: what this payload drops is in the next difference. The copy moves
                # by what was decoded, as the target's does, and not by what was to be sent.
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
                # The sum that the sender made, in its order: both copies have the same bits.
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
        """The copies, as arrays by rank."""
        return {
            "format": _FORMAT,
            "base": None if self.base is None else self.base.copy(),
            "told": {rank: copy.copy() for rank, copy in self._sent.items()},
            "heard": {rank: copy.copy() for rank, copy in self._heard.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved copies; CompressError, and no change, if they are of other tensors."""
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
            # A copy that another rank is asked for later begins from the base; without one, both
            # ends would begin from different weights.
            if base is None and (sent or heard):
                raise CompressError("saved copies without the weights they began with")
        return base, sent, heard

    def take(self, copies: Copies) -> None:
        """Continue with what `read` returned."""
        self.base, self._sent, self._heard = copies


def _replace(copy: Floats, values: npt.NDArray[Any]) -> None:
    """Update a copy in place; a copy that held NaN once would hold it for ever."""
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


WIDTH = 256  # numbers of a sketch: a standard deviation of 4 % for 2 KiB in a message
_SEED = 0  # shared by all ranks


def signs(rows: int) -> Floats:
    """+1 or -1 for each row of WIDTH elements, [rows] float32, the same on all ranks."""
    return np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), rows)


def rows_of(n: int) -> int:
    """Rows of n elements, the last one filled up with zeros."""
    return -(-n // WIDTH)


def spread(total: npt.NDArray[np.float64], ranks: int) -> float:
    """Root mean square distance to the mean over the root mean square norm.

    total : [WIDTH + 2] the sum over the ranks of their numbers, of the squared norm of these, and
        of the squared norm of the weights
    """
    numbers, squares, norms = total[:-2], float(total[-2]), float(total[-1])
    # Of equal ranks rounding could leave less than nothing.
    squared_distance = max(squares - float(numbers @ numbers) / ranks, 0.0)
    return math.sqrt(squared_distance / norms) if norms else 0.0
