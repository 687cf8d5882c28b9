"""Codec and Payload: the contract every compression method keeps.

A payload is 32 bytes of header and a body. The size of the body follows from the codec's
settings and the number of elements alone, never from the data: Horovod's response cache and
NCCL's all-gather both punish sizes that change from step to step. `docs/format.md` lists the
bytes; `tests/golden/` keeps old ones readable.
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
# What is written; 3 where one FFT is longer than blocks are, whose coefficients are other ones than
# before (decision 86). Version 1, with another checksum, is still read.
VERSION = 2
HEADER_BYTES = 32
SETTINGS_BYTES = 12
ALIGN = 16
MAX_ELEMENTS = 2**48
# What a reader allocates at most who has not said how many elements it expects: at theta near 1 a
# payload of some tens of bytes may stand for 2**32 of them.
_MOST_UNASKED, _MOST_OF_A_BYTE = 2**26, 2**16
# magic, version, codec id, n, settings, saturated, checksum
_HEADER = struct.Struct("<2sBBQ12sII")
_CHECKSUMS = {1: sums.weighted_sum, VERSION: sums.crc, 3: sums.crc}


@dataclass(frozen=True, eq=False)
class Payload:
    """One encoded vector: header and body in one buffer.

    Attributes
    ----------
    buffer : [nbytes] uint8, the bytes as they travel (a multiple of 16)
    codec_id, n, settings, saturated : what the header says; `settings` are 12 bytes that only
        the codec understands, `saturated` counts values clipped to the ends of a fixed range.
    energy, error : float or None; the squared norm of what was encoded and of what was lost.
        They are known only where the payload was made and do not travel.
    framework : "torch" if a torch tensor on a GPU was encoded, "cupy" for others there: decoded
        on the GPU, it becomes the same again. Does not travel, either
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
        """Write the header in front of a finished body; `buffer` has room for both."""
        saturated = min(saturated, 2**32 - 1)  # a counter that ends rather than wraps around
        head = _HEADER.pack(MAGIC, version, codec_id, n, settings, saturated, 0)
        # The checksum last: it is that of the whole payload with zeros in its own place.
        buffer[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
        buffer[28:32] = np.frombuffer(struct.pack("<I", sums.crc(buffer)), np.uint8)
        return cls(buffer, codec_id, n, settings, saturated, energy, error)

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview | Bytes, *, n: int | None = None
    ) -> Payload:
        """Read a payload; the bytes may come from an untrusted peer.

        They are not copied, unless they begin at an address that is no multiple of four.

        Parameters
        ----------
        n : the elements it has to have, which decoding allocates. Pass it wherever it is known:
            else a few bytes may ask for up to 2**26 elements, or 2**16 for each of them

        Raises
        ------
        PayloadError
            If the length, magic, version, element count or checksum is wrong.
            What is inside the body is checked by the codec that decodes it.
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
        # The version before the checksum, which is another in each: a rank with a later release
        # shall read of versions, not of corruption.
        if magic != MAGIC or version not in _CHECKSUMS:
            raise PayloadError(
                f"not a payload of this format: got magic {magic!r}, version {version}; "
                f"expected {MAGIC!r}, 1 to {max(_CHECKSUMS)}. Use one version on all ranks."
            )
        if claimed > MAX_ELEMENTS:
            raise PayloadError(
                f"header claims {claimed} elements; the format allows {MAX_ELEMENTS}"
            )
        # Damage before sizes: a flipped bit in n is damage, and not another model.
        if (checksum := _CHECKSUMS[version](buffer)) != written:
            raise PayloadError(
                f"checksum is {checksum:#010x}, header says {written:#010x}: corrupt in transit. "
                "Resend; if it happens again, suspect memory or the network."
            )
        check_size(claimed, n, buffer.size)
        return cls(buffer, codec_id, claimed, settings, saturated)


def check_size(claimed: int, n: int | None, nbytes: int) -> None:
    """Raise PayloadError if a header claims another number of elements than the caller expects.

    Without one, if it claims more than a payload of so many bytes is likely to stand for.
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
    """Turns a vector of floats into a Payload and back. Settings are keyword-only and constant."""

    codec_id: int
    settings: bytes
    version = VERSION  # of the format, as written into headers
    # Whether a state holds what was dropped, in as many numbers as the vector has elements or more:
    # a saved one with fewer is refused before anything of the size that it declares is allocated.
    remembers = True

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that say what a state is: `type(self)(**basis)` reads states of this one."""
        return {}

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Size of the payload of n elements, header included."""

    @abstractmethod
    def encode(self, values: npt.ArrayLike, *, state: Any = None, decay: float = 1.0) -> Payload:
        """Encode [n] float32, float16 or bfloat16: NumPy, CuPy, torch, others by DLPack.

        A vector on a GPU gives a payload on that GPU, which decodes to a vector there; a codec
        without CUDA kernels copies it to the host meanwhile and says so once.
        `state`, made by `new_state(n)`, is the memory of what earlier calls dropped: times `decay`
        it is added before, and updated after, in place. Non-finite input never enters it.
        """

    @abstractmethod
    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of what the payloads hold, [n] float32, summed in the order given."""

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
        """What the payload holds, [n] float32; PayloadError if `n` is given and another."""
        if n is not None:
            check_size(payload.n, n, payload.nbytes)
        return self.decode_mean([payload])

    @abstractmethod
    def new_state(self, n: int) -> Any:
        """An empty memory for vectors of n elements."""

    def state_to_values(self, state: Any, n: int) -> Floats:
        """The memory as the vector it stands for, [n] float32; zeros if the codec has none."""
        return np.zeros(n, np.float32)

    def values_to_state(self, values: npt.ArrayLike) -> Any:
        """The memory that stands for a vector of float32; inverse of state_to_values.

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
        """The state where encoding vectors like this one wants it; on the host, as it is."""
        return state

    def dump_state(self, state: Any, n: int) -> dict[str, Any]:
        """A copy of a state as arrays, numbers and strings, for load_state to go on bit by bit.

        A codec whose state is no list of arrays has its own form.
        """
        return {"arrays": [np.array(part) for part in state]}

    def load_state(self, saved: dict[str, Any], n: int) -> Any:
        """The state of n elements that was dumped by a codec of the same class and basis.

        Raises CompressError if something is missing, of another shape, NaN or Inf.
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
    """What a saved state holds under `key`, or CompressError."""
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

    Floats must be finite, and counters, of an integer type, 0 or more.
    """
    array = np.asarray(saved)
    numbers = "iu" if like.dtype.kind == "i" else "iuf"
    if array.shape != like.shape or (array.size and array.dtype.kind not in numbers):
        raise CompressError(
            f"contains an array of shape {array.shape} and dtype {array.dtype}; expected "
            f"{like.shape} and {like.dtype}. {_OTHER}"
        )
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes Inf, which is refused below
        copy = np.array(array, like.dtype, order="C")
    if like.dtype.kind == "i" and (copy < 0).any():
        raise CompressError(f"step count is {copy.min()}; expected 0 or more. {_OTHER}")
    if not np.isfinite(copy).all():
        raise CompressError(
            "contains NaN or Inf, which error feedback would keep for ever: the state is corrupt. "
            f"{_OTHER}"
        )
    return copy


def as_vector(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Check that `values` is a 1-D array of a float type a codec takes; nothing is copied.

    Whatever NumPy can read is taken, so torch tensors on the CPU are, too.
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
    # ml_dtypes' bfloat16 has kind 'V' in NumPy, so it is known by name.
    if array.dtype.name not in ("float32", "float16", "bfloat16"):
        raise CompressError(
            f"cannot encode dtype {array.dtype}; expected float32, float16 or bfloat16. "
            "Cast it: values.astype('float32')."
        )
    return array


def mean_of_gathered(codec: Codec, gathered: Bytes, ranks: int, n: int) -> Floats:
    """The mean of the ranks' vectors, [n] float32.

    gathered : uint8, the ranks' payloads in order of rank; summed in that order, so that every rank
        gets the same bits.
    Raises PayloadError if the bytes are not that.
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
    """The ranks' payloads of n elements from their bytes, in order of rank.

    Raises PayloadError, which names the rank, if bytes are not a payload.
    """
    payloads = []
    for rank, part in enumerate(parts):
        try:
            payloads.append(Payload.from_bytes(part, n=n))
        except PayloadError as error:
            raise PayloadError(f"from rank {rank}: {error}") from error
    return payloads
