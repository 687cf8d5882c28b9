"""Codec and Payload: the interface of every compression method.

A payload is 32 bytes of header and a body. The size of the body depends only on the codec's
settings and the number of elements, never on the data: Horovod's response cache and NCCL's
all-gather both suffer from sizes that change from step to step. `docs/format.md` specifies the
format; `tests/golden/` ensures that old payloads stay readable.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import saved as saved_
from ..errors import CompressError, PayloadError
from ..ops import checksum as sums

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MAGIC = b"SN"
# The version written; 3 for FFTs longer than blocks can be, whose coefficients have changed
# (decision 86). Version 1, with another checksum, can still be read.
VERSION = 2
HEADER_BYTES = 32
SETTINGS_BYTES = 12
ALIGN = 16
MAX_ELEMENTS = 2**48
# Maximum allocation if the caller does not pass the expected number of elements: at theta near 1 a
# payload of some tens of bytes may represent 2**32 of them.
_MOST_UNASKED, _MOST_OF_A_BYTE = 2**26, 2**16
# magic, version, codec id, n, settings, saturated, checksum
_HEADER = struct.Struct("<2sBBQ12sII")
_CHECKSUMS = {1: sums.weighted_sum, VERSION: sums.crc, 3: sums.crc}


@dataclass(frozen=True, eq=False)
class Payload:
    """One encoded vector: header and body in one buffer.

    Attributes
    ----------
    buffer : [nbytes] uint8, the bytes as sent (a multiple of 16)
    codec_id, n, settings, saturated : fields of the header; `settings` are 12 bytes that only
        the codec understands, `saturated` counts values clipped to the ends of a fixed range.
    energy, error : float or None; the squared norm of what was encoded and of what was lost.
        Known only where the payload was encoded; not sent.
    framework : "torch" if a torch tensor on a GPU was encoded, "cupy" for others on a GPU:
        decoding on the GPU returns the same kind. Not sent either
    """

    buffer: Bytes
    codec_id: int
    n: int
    settings: bytes
    saturated: int = 0
    energy: float | None = field(default=None, compare=False)
    error: float | None = field(default=None, compare=False)
    framework: str | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return int(self.buffer.nbytes)

    @property
    def body(self) -> Bytes:
        return self.buffer[HEADER_BYTES:]

    def to_bytes(self) -> bytes:
        return self.buffer.tobytes()

    @classmethod
    def seal(
        cls, buffer: Bytes, *, codec_id: int, n: int, settings: bytes, saturated: int = 0,
        energy: float | None = None, error: float | None = None, version: int = VERSION,
    ) -> Payload:  # fmt: skip
        """Write the header before a finished body; `buffer` has room for both."""
        saturated = min(saturated, 2**32 - 1)  # saturate the counter rather than wrap around
        head = _HEADER.pack(MAGIC, version, codec_id, n, settings, saturated, 0)
        # The checksum last: it covers the whole payload, with its own field as zeros.
        buffer[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
        buffer[28:32] = np.frombuffer(struct.pack("<I", sums.crc(buffer)), np.uint8)
        return cls(buffer, codec_id, n, settings, saturated, energy, error)

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview | Bytes, *, n: int | None = None
    ) -> Payload:
        """Read a payload; the bytes may come from an untrusted peer.

        They are not copied, unless their address is not a multiple of four.

        Parameters
        ----------
        n : the expected number of elements, which decoding allocates. Pass it wherever it is known:
            otherwise a few bytes may claim up to 2**26 elements, or 2**16 elements per byte

        Raises
        ------
        PayloadError
            If the length, magic, version, element count or checksum is wrong.
            The contents of the body are checked by the codec that decodes it.
        """
        buffer = np.frombuffer(data, np.uint8)
        if buffer.ctypes.data % 4:  # the body is read as 32-bit words
            buffer = buffer.copy()
        if buffer.size < HEADER_BYTES or buffer.size % ALIGN:
            raise PayloadError(
                f"{buffer.size} bytes are not a payload: expected {HEADER_BYTES} or more, in "
                f"multiples of {ALIGN}. Pass the bytes of Payload.to_bytes() unchanged."
            )
        magic, version, codec_id, claimed, settings, saturated, written = _HEADER.unpack(
            buffer[:HEADER_BYTES].tobytes()
        )
        # Check the version before the checksum, which depends on it: for a rank with another
        # release the error should be about versions, not corruption.
        if magic != MAGIC or version not in _CHECKSUMS:
            raise PayloadError(
                f"not a payload of this format: got magic {magic!r}, version {version}; "
                f"expected {MAGIC!r}, 1 to {max(_CHECKSUMS)}. Use one version on all ranks."
            )
        if claimed > MAX_ELEMENTS:
            raise PayloadError(
                f"header claims {claimed} elements; the format allows {MAX_ELEMENTS}"
            )
        # Check for corruption before sizes: a flipped bit in n is corruption, not another model.
        if (checksum := _CHECKSUMS[version](buffer)) != written:
            raise PayloadError(
                f"checksum is {checksum:#010x}, header says {written:#010x}: corrupt in transit. "
                "Resend; if it happens again, suspect memory or the network."
            )
        check_size(claimed, n, buffer.size)
        return cls(buffer, codec_id, claimed, settings, saturated)


def check_size(claimed: int, n: int | None, nbytes: int) -> None:
    """Raise PayloadError if a header claims a number of elements other than the expected n.

    If n is None, raise if it claims more than a payload of this size plausibly represents.
    """
    if n is not None and claimed != n:
        raise PayloadError(
            f"header claims {claimed} elements; expected {n}. Do all ranks run the same model?"
        )
    most = max(_MOST_UNASKED, _MOST_OF_A_BYTE * nbytes)
    if n is None and claimed > most:
        raise PayloadError(
            f"header claims {claimed} elements in {nbytes} bytes; expected at most {most} unless n "
            "is given. Pass it: Payload.from_bytes(data, n=...)."
        )


class Codec(ABC):
    """Converts a vector of floats to a Payload and back. Settings are keyword-only and constant."""

    codec_id: int
    settings: bytes
    version = VERSION  # of the format, as written into headers
    # Whether a state contains what was dropped, in at least as many numbers as the vector has: a
    # saved state with fewer is rejected before anything of its declared size is allocated.
    remembers = True

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that define a state: `type(self)(**basis)` can read this codec's states."""
        return {}

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the size of the payload of n elements, header included."""

    @abstractmethod
    def encode(self, values: npt.ArrayLike, *, state: Any = None, decay: float = 1.0) -> Payload:
        """Encode [n] float32, float16 or bfloat16: NumPy, CuPy, torch, others by DLPack.

        A vector on a GPU is encoded to a payload on that GPU, which decodes to a vector there; a
        codec without CUDA kernels goes through the host and warns once.
        `state`, from `new_state(n)`, is the error memory of earlier calls: times `decay` it is
        added before encoding, and it is updated afterwards, in place. Non-finite input never enters
        it.
        """

    @abstractmethod
    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """Return the mean of the decoded payloads, [n] float32, summed in the given order."""

    def encode_into(
        self, buffer: Bytes, values: npt.ArrayLike, *, state: Any = None, decay: float = 1.0
    ) -> Payload:
        """Encode into [payload_bytes(n)] uint8 on the host, which the payload then keeps."""
        payload = self.encode(values, state=state, decay=decay)
        buffer[:] = payload.buffer
        return replace(payload, buffer=buffer)

    def decode_mean_into(self, payloads: Sequence[Payload], out: Floats) -> None:
        """Write the mean into `out`, [n] float32 on the host."""
        out[:] = self.decode_mean(payloads)

    def decode(self, payload: Payload, *, n: int | None = None) -> Floats:
        """Decode a payload to [n] float32; PayloadError if `n` is given and does not match."""
        if n is not None:
            check_size(payload.n, n, payload.nbytes)
        return self.decode_mean([payload])

    @abstractmethod
    def new_state(self, n: int) -> Any:
        """Return an empty memory for vectors of n elements."""

    def state_to_values(self, state: Any, n: int) -> Floats:
        """Convert the memory to a residual, [n] float32; zeros if the codec has none."""
        return np.zeros(n, np.float32)

    def values_to_state(self, values: npt.ArrayLike) -> Any:
        """Convert a float32 residual to a memory; inverse of state_to_values.

        Raises CompressError if the codec has no memory and the vector is not zero.
        """
        array = as_vector(values)
        if array.any():
            raise CompressError(
                f"{type(self).__name__} keeps no error memory, so a saved one cannot be loaded "
                "into it. Start without one."
            )
        return self.new_state(array.size)

    def place_state(self, state: Any, like: Any) -> Any:
        """Move the state to where encoding vectors like this one needs it; default: unchanged."""
        return state

    def dump_state(self, state: Any, n: int) -> dict[str, Any]:
        """Copy a state to arrays, numbers and strings, for load_state to resume bit by bit.

        A codec whose state is not a list of arrays overrides this.
        """
        return {"arrays": [np.array(part) for part in state]}

    def load_state(self, saved: dict[str, Any], n: int) -> Any:
        """Load a state of n elements, dumped by a codec of the same class and basis.

        Raises CompressError if something is missing, has another shape, or is NaN or Inf.
        """
        arrays = saved_item(saved, "arrays")
        # Before new_state(n) below, which allocates n elements.
        if self.remembers:
            check_held(arrays, n)
        expected = self.new_state(n)
        if not isinstance(arrays, (list, tuple)) or len(arrays) != len(expected):
            count = len(arrays) if isinstance(arrays, (list, tuple)) else 0
            raise CompressError(f"contains {count} arrays; expected {len(expected)}. {_OTHER}")
        return [saved_array(a, like) for a, like in zip(arrays, expected, strict=True)]


_OTHER = "Load what was saved, unchanged, or forget this tensor and start without."


def saved_item(saved: Any, key: str) -> Any:
    """Return the entry `key` of a saved state; CompressError without it."""
    if not isinstance(saved, dict) or key not in saved:
        has = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise CompressError(f"has no {key!r}, only {has}. {_OTHER}")
    return saved[key]


def check_held(arrays: Any, n: int) -> None:
    """Raise CompressError unless saved arrays have at least n elements."""
    if (contained := saved_.held(arrays)) < n:
        raise CompressError(f"declares {n} elements, contains {contained}. {_OTHER}")


def saved_array(saved: Any, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy of a saved array; CompressError unless it has `like`'s shape and kind.

    Floats must be finite, and counters (integers) not negative.
    """
    array = np.asarray(saved)
    numbers = "iu" if like.dtype.kind == "i" else "iuf"
    if array.shape != like.shape or (array.size and array.dtype.kind not in numbers):
        raise CompressError(
            f"contains an array of shape {array.shape} and dtype {array.dtype}; expected "
            f"{like.shape} and {like.dtype}. {_OTHER}"
        )
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes Inf, rejected below
        copy = np.array(array, like.dtype, order="C")
    if like.dtype.kind == "i" and (copy < 0).any():
        raise CompressError(f"step count is {copy.min()}; expected 0 or more. {_OTHER}")
    if not np.isfinite(copy).all():
        raise CompressError(
            "contains NaN or Inf, which error feedback would keep forever: the state is corrupt. "
            f"{_OTHER}"
        )
    return copy


def as_vector(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Check that `values` is a 1-D array of a float type that codecs accept; nothing is copied.

    Accepts whatever NumPy can read, including torch tensors on the CPU.
    """
    try:
        array = np.asarray(values)
    except (TypeError, RuntimeError) as error:  # torch's bfloat16; a tensor that needs gradients
        raise CompressError(
            f"cannot encode a {type(values).__qualname__}, which NumPy does not read: {error}. "
            "Expected an array; pass tensor.detach().float()."
        ) from error
    if array.ndim != 1:
        raise CompressError(
            f"cannot encode an array of shape {array.shape}; expected one dimension. "
            "Flatten it: values.reshape(-1)."
        )
    # ml_dtypes' bfloat16 has kind 'V' in NumPy, so compare by name.
    if array.dtype.name not in ("float32", "float16", "bfloat16"):
        raise CompressError(
            f"cannot encode dtype {array.dtype}; expected float32, float16 or bfloat16. "
            "Cast it: values.astype('float32')."
        )
    return array


def mean_of_gathered(codec: Codec, gathered: Bytes, ranks: int, n: int) -> Floats:
    """Return the mean of the ranks' vectors, [n] float32.

    gathered : uint8, the ranks' payloads in rank order; summed in that order, so that every rank
        gets the same bits.
    Raises PayloadError if the bytes are not valid.
    """
    size = codec.payload_bytes(n)
    if gathered.size != ranks * size:
        raise PayloadError(
            f"gathered {gathered.size} bytes from {ranks} ranks; expected {size} from each. Do "
            "all ranks run the same version with the same settings?"
        )
    parts = np.split(gathered, ranks)
    return codec.decode_mean(payloads_of(parts, n))


def payloads_of(parts: Sequence[Bytes], n: int) -> list[Payload]:
    """Return the ranks' payloads of n elements from their bytes, in rank order.

    Raises PayloadError, which names the rank, if bytes are not a payload.
    """
    payloads = []
    for rank, part in enumerate(parts):
        try:
            payloads.append(Payload.from_bytes(part, n=n))
        except PayloadError as error:
            raise PayloadError(f"from rank {rank}: {error}") from error
    return payloads
