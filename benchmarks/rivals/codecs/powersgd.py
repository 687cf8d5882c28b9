"""PowerSGD: a gradient matrix as the product of two thin factors, by one power iteration a step.

The singular value decomposition gives the best factors and takes far too long. One step of power
iteration, started from the last step's factor, follows it over time (Vogels, Karimireddy, Jaggi,
NeurIPS 2019). Published PowerSGD all-reduces P, orthogonalises, then all-reduces Q, so that all
ranks share one approximation *of the mean*: two dependent collectives whose cost does not grow
with the number of ranks. `powersgd_allreduce` is that scheme.

A codec sees one rank: its payload holds that rank's own P and Q, and decode_mean averages the
products. The mean then has rank up to r times the number of ranks and is the closer one, but
ranks must gather r payloads. Use the codec to measure, the function to compare.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sn_compress.codecs import frame
from sn_compress.codecs.base import Floats, Payload
from sn_compress.errors import CompressError
from sn_compress.ops import codes
from sn_compress.ops.products import directions

_SETTINGS = struct.Struct("<HIH")
Matrix = npt.NDArray[np.float32]


class PowerSGDCodec(frame.HostCodec):
    """Factors P (rows x rank, orthonormal) and Q (columns x rank) in float32.

    Parameters
    ----------
    shape : (rows, columns) of the gradient; for a convolution (out, in * height * width). None,
        and shapes whose factors would not be smaller than the matrix, travel as float32
    rank : int from 1 to 65535; cut to the smaller side
    seed : of the first Q, the same on every rank

    Notes
    -----
    Error feedback and Q for the next step are in the state; without it, Q is the first one every
    time. Products are formed in float64 and rounded once, so small gradients do not underflow. A
    matrix with NaN or Inf, or whose factors overflow float32, decodes to NaN everywhere and
    leaves the state as it was.

    Examples
    --------
    >>> codec = PowerSGDCodec(shape=(50, 40), rank=2)
    >>> codec.payload_bytes(2000)  # 32 + 4 * 2 * (50 + 40)
    752
    """

    codec_id = 21
    error_feedback = True

    def __init__(
        self, *, shape: tuple[int, int] | None = None, rank: int = 1, seed: int = 0
    ) -> None:
        ok = shape is None or (
            isinstance(shape, tuple)
            and len(shape) == 2
            and all(frame.is_int(side, 0, 2**32 - 1) for side in shape)
        )
        frame.check_setting(self, "shape", shape, ok, "(rows, columns), or None")
        frame.check_int(self, "rank", rank, 1, 65535, "1 to 65535")
        frame.check_int(self, "seed", seed, 0, 2**64 - 1, "0 to 2**64 - 1")
        self.shape, self.rank, self.seed = shape, rank, seed
        rows, cols = shape or (0, 0)
        r = min(rank, rows, cols)
        # 0 says: sent as it is.
        self._rank = r if r * (rows + cols) < rows * cols else 0
        self.settings = frame.settings(_SETTINGS.pack(self._rank, rows, 0))

    def __repr__(self) -> str:
        return frame.show(self, "shape", "rank", "seed")

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that give a state its shapes."""
        return {"shape": self.shape, "rank": self.rank}

    def payload_bytes(self, n: int) -> int:
        if self.shape is not None and n != self.shape[0] * self.shape[1]:
            raise CompressError(
                f"PowerSGDCodec: {n} elements for shape {self.shape}; expected "
                f"{self.shape[0] * self.shape[1]}. Make one codec per shape."
            )
        if not self._rank or self.shape is None:
            return frame.framed_bytes(4 * n)
        return frame.framed_bytes(4 * self._rank * sum(self.shape))

    def new_state(self, n: int) -> frame.State:
        """What was lost, [n] float32, and the next Q, [columns, rank] float32."""
        self.payload_bytes(n)
        return [np.zeros(n, np.float32), self._first_q()]

    def _first_q(self) -> Matrix:
        cols = self.shape[1] if self.shape else 0
        return normal_matrix(self.seed, cols, self._rank)

    def state_to_values(self, state: frame.State, n: int) -> Floats:
        """The memory as the vector it stands for, [n] float32."""
        return state[0].copy()

    def values_to_state(self, values: npt.ArrayLike) -> frame.State:
        """The memory that stands for a vector, with the first Q."""
        return [frame.as_floats(values).copy(), self._first_q()]

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode."""
        array = frame.add_memory(array, state, decay)
        n = array.size
        self.payload_bytes(n)
        if not self._rank or self.shape is None:
            decoded = array if np.isfinite(array).all() else np.full(n, np.nan, np.float32)
            frame.remember(state, array, decoded)
            parts = [decoded.astype("<f4")]
            return frame.seal(self, n, parts, frame.losses(array, decoded))
        q = self._first_q() if state is None else state[1]
        p, q = _factors(array.reshape(self.shape), q, self._first_q())
        decoded = _product(p, q)
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(array - decoded).all())
        if finite and state is not None:
            frame.remember(state, array, decoded)
            state[1][:] = q
        if not finite:
            p, decoded = np.full_like(p, np.nan), np.full(n, np.nan, np.float32)
        parts = [p.astype("<f4"), q.astype("<f4")]
        return frame.seal(self, n, parts, frame.losses(array, decoded))

    def _decode(self, payload: Payload) -> Floats:
        if not self._rank or self.shape is None:
            values = frame.read(payload.body, 0, payload.n, "<f4")
        else:
            rows, cols = self.shape
            count = rows * self._rank
            p = frame.read(payload.body, 0, count, "<f4").reshape(rows, self._rank)
            q = frame.read(payload.body, 4 * count, cols * self._rank, "<f4")
            values = _product(p, q.reshape(cols, self._rank))
        if not np.isfinite(values).all():
            return np.full(payload.n, np.nan, np.float32)
        return values


def normal_matrix(seed: int, rows: int, cols: int) -> Matrix:
    """[rows, cols] float32, standard normal; the same on every rank (Box-Muller)."""
    count = (rows * cols + 1) // 2
    words = codes.uniform_words(seed, 0, 2 * count).astype(np.float64)
    # One more: of the word 0 there is no logarithm.
    radius = np.sqrt(-2 * np.log((words[:count] + 1) * 2.0**-32))
    angle = words[count:] * (2 * np.pi * 2.0**-32)
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return pairs[: rows * cols].reshape(rows, cols).astype(np.float32)


def powersgd_allreduce(
    vectors: Sequence[npt.ArrayLike], shape: tuple[int, int], rank: int, q: Matrix | None = None
) -> tuple[Floats, Matrix]:
    """What published PowerSGD gives all ranks for one step: the approximated mean and the next Q.

    Parameters
    ----------
    vectors : one [rows * columns] vector per rank, its error memory already added
    shape, rank : as in PowerSGDCodec
    q : [columns, rank] float32, the last step's; None draws the first one

    Returns
    -------
    mean : [rows * columns] float32, the same on every rank. A rank's new error is its vector
        minus this
    q : [columns, rank] float32 for the next step
    """
    matrices = [frame.as_floats(vector).reshape(shape).astype(np.float64) for vector in vectors]
    first = normal_matrix(0, shape[1], min(rank, *shape))
    start = _alive(first if q is None else q, first).astype(np.float64)
    weight = 1 / len(matrices)
    # The first all-reduce.
    p = np.linalg.qr(sum((m @ start for m in matrices), np.zeros(())) * weight)[0]
    # The second.
    p = p.astype(np.float32).astype(np.float64)
    new_q = sum((m.T @ p for m in matrices), np.zeros(())) * weight
    factor = new_q.astype(np.float32)
    return _product(p.astype(np.float32), factor), factor


def _factors(matrix: Matrix, q: Matrix, first: Matrix) -> tuple[Matrix, Matrix]:
    """One power iteration: P orthonormal [rows, r], Q [columns, r]; NaN if the matrix has one."""
    if not np.isfinite(matrix).all():
        nothing = np.full((matrix.shape[0], q.shape[1]), np.nan, np.float32)
        return nothing, np.full(q.shape, np.nan, np.float32)
    exact = matrix.astype(np.float64)
    p = directions(exact, _alive(q, first).astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore"):
        return p, (exact.T @ p.astype(np.float64)).astype(np.float32)


def _alive(q: Matrix, first: Matrix) -> Matrix:
    """Q with columns that died (a zero gradient makes them zero) drawn again."""
    return np.where(np.abs(q).max(axis=0, initial=0) > 0, q, first)


def _product(p: Matrix, q: Matrix) -> Floats:
    """P Q^T, flat, added column by column: ranks must agree on every bit, and a BLAS may not."""
    out = np.zeros((len(p), len(q)), np.float32)
    with np.errstate(all="ignore"):
        for column in range(p.shape[1]):
            out += np.multiply.outer(p[:, column], q[:, column])
    return out.reshape(-1)
