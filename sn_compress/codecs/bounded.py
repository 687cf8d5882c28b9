"""Error-bounded values: no element is off by more than a bound, and zeros stay zero.

A gradient may drop an element completely and make up for it at the next step. A saved activation is
used only once, so what matters is that no error is large and that errors average out. "fixed" has
1, 2, 4 or 8 bits per element, on a grid per group, with stochastic and thus unbiased rounding;
"paper" is the method of the paper on compressed activations (Jin et al., arXiv 2011.09017): rounded
to nearest, predicted, entropy-coded; smaller, but biased, and its size depends on the data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import CompressError, PayloadError
from ..ops import codes, groups, lorenzo
from . import frame
from .base import HEADER_BYTES, Floats, Payload

_SETTINGS = struct.Struct("<fBBBxI")
_COUNTS = struct.Struct("<QQ")
_FORMS = ("fixed", "paper")
_NAN_STEP = 0x7FC0  # the upper half of a float32 NaN
_SMALLEST = 2.0**-100


class BoundedCodec(frame.HostCodec):
    """Keeps every element within an absolute bound.

    Parameters
    ----------
    bound : largest absolute error, 2**-100 or more; may be infinite in the fixed form, whose groups
        then have the finest grid that covers them
    form : "fixed", whose size is known in advance, or "paper", whose size depends on the data
    bits : per element, 1, 2, 4 or 8 (fixed)
    group : number of elements that share a grid, a power of two from 32 to 65536 (fixed)
    escapes : fraction of the elements that may be stored uncompressed, 0 to 1 (fixed)
    seed : int from 0 to 2**64 - 1, of the random numbers (fixed)
    threads : number of threads to encode and decode
    measure : whether payloads have `energy` and `error`; without, encoding is twice as fast

    Notes
    -----
    An element that no code can represent escapes: it is stored uncompressed, including NaN and Inf.
    If the fixed form has no room for it, `Payload.saturated` counts it; the bound holds everywhere
    only if that is 0. More NaN or Inf than fit make their groups NaN.

    The expectation of the fixed form's `decode(encode(x))` is x, up to the rounding of float32. Its
    errors are below the step of their group, which is the bound or finer. At one bit, a group with
    zeros and both signs has no grid: its zeros escape, or, if these are no fewer than the elements
    of either sign, most elements of one sign.

    Examples
    --------
    >>> codec = BoundedCodec(bound=0.1, bits=4)
    >>> x = np.linspace(0, 1, 1000, dtype=np.float32)
    >>> bool(np.abs(codec.decode(codec.encode(x)) - x).max() < 0.1)
    True
    """

    codec_id = 24
    remembers = False
    error_feedback = False

    def __init__(
        self,
        *,
        bound: float,
        form: Literal["fixed", "paper"] = "fixed",
        bits: int = 4,
        group: int = 256,
        escapes: float = 1 / 512,
        seed: int = 0,
        threads: int = 1,
        measure: bool = True,
    ) -> None:
        frame.check_setting(self, "form", form, form in _FORMS, " or ".join(_FORMS))
        finite = frame.fraction(bound, _SMALLEST, 2.0**120)
        ok = finite or (form == "fixed" and frame.fraction(bound, math.inf, math.inf))
        frame.check_setting(self, "bound", bound, ok, "2**-100 to 2**120, or inf if form='fixed'")
        widths = ", ".join(map(str, groups.WIDTHS))
        frame.check_setting(self, "bits", bits, bits in groups.WIDTHS, widths)
        ok = frame.is_int(group, 32, 65536) and group & (group - 1) == 0
        frame.check_setting(self, "group", group, ok, "a power of two from 32 to 65536")
        frame.check_setting(self, "escapes", escapes, frame.fraction(escapes, 0, 1), "0 to 1")
        frame.check_int(self, "seed", seed, 0, 2**64 - 1, "0 to 2**64 - 1")
        frame.check_int(self, "threads", threads, 1, 1024, "1 to 1024")
        frame.check_setting(self, "measure", measure, isinstance(measure, bool), "True or False")
        self.bound, self.form, self.bits, self.group = bound, form, bits, group
        self.escapes, self.seed, self.threads, self.measure = escapes, seed, threads, measure
        # Sent as float32: rounded down, so that no error exceeds the requested bound.
        single = np.float32(bound)
        down = np.nextafter(single, np.float32(0))
        self._bound = float(down if float(single) > bound else single)
        self._room = int(escapes * (2**32 - 1))
        fixed = (0, bits, group.bit_length() - 1, self._room)
        packed = _SETTINGS.pack(self._bound, *(fixed if form == "fixed" else (1, 0, 0, 0)))
        self.settings = frame.settings(packed)

    def __repr__(self) -> str:
        names = ("bits", "group", "escapes", "seed") if self.form == "fixed" else ()
        shown = frame.show(self, "bound", "form", *names, "threads", "measure")
        return shown.replace("bound=inf", "bound=float('inf')")

    def room(self, n: int) -> int:
        """Return the number of elements that may escape in a payload of n (fixed)."""
        return min(n, (n * self._room >> 32) + 1)

    def payload_bytes(self, n: int) -> int:
        if self.form == "paper":
            raise CompressError(
                "BoundedCodec: the size of form='paper' depends on the data, and collectives need "
                "it in advance. Use form='fixed' for payloads that are exchanged."
            )
        at, _ = self._parts(n)
        return frame.framed_bytes(at[-1])

    def _parts(self, n: int) -> tuple[list[int], str]:
        """Return offsets of bases, count, positions, values, steps and codes, and the end."""
        ng, room = codes.bucket_count(n, self.group), self.room(n)
        kind = "<u4" if n < 2**32 else "<u8"
        sizes = [4 * ng, 8, int(kind[2]) * room, 4 * room, 2 * ng, codes.packed_bytes(n, self.bits)]
        # Python integers: the format allows 8 bytes for each of 2**48 elements and more.
        return [0, *np.cumsum(sizes, dtype=object)], kind

    def quantise(self, values: npt.ArrayLike, *, step: int = 0) -> groups.Grids | lorenzo.Stream:
        """Return codes and escapes of [n] without a payload: for storage, not for sending.

        Includes all escapes, however many; nothing is clipped.
        """
        if self.form == "paper":
            return lorenzo.pack(frame.as_floats(values), self._bound)
        # Two-byte floats are read directly; uint16 are the bits of bfloat16.
        narrow = isinstance(values, np.ndarray) and values.dtype in (np.float16, np.uint16)
        array = np.asarray(values) if narrow else frame.as_floats(values)
        key = groups.keys(self.seed, step)
        return groups.pack(array, self.bits, self.group, self._bound, key, self.threads)

    def restore(self, quantised: groups.Grids | lorenzo.Stream, n: int) -> Floats:
        """Return the values, [n] float32, of what `quantise` returned."""
        if isinstance(quantised, lorenzo.Stream):
            out = lorenzo.unpack(quantised.coded, n, self._bound)
        else:
            out = self._values(quantised.bases, quantised.steps, quantised.codes, n)
        out[quantised.at] = quantised.values
        return out

    def kept_bytes(self, quantised: groups.Grids | lorenzo.Stream) -> int:
        """Return the bytes that the result of `quantise` occupies, without header or free room."""
        escaped = quantised.at.nbytes + quantised.values.nbytes
        if isinstance(quantised, lorenzo.Stream):
            return len(quantised.coded) + escaped
        return quantised.bases.nbytes + quantised.steps.nbytes + quantised.codes.nbytes + escaped

    def _values(self, bases: Floats, steps: groups.Steps, packed: codes.Bytes, n: int) -> Floats:
        out = np.empty(n, np.float32)
        groups.unpack(bases, steps, packed, n, self.bits, self.group, self.threads, out)
        return out

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        quantised = self.quantise(array, step=frame.take_step(state))
        if isinstance(quantised, lorenzo.Stream):
            return self._seal_paper(array, quantised)
        return self._seal_fixed(array, quantised)

    def _seal_fixed(self, array: Floats, grids: groups.Grids) -> Payload:
        n, room = array.size, self.room(array.size)
        at, lost, saturated = grids.at, grids.values, 0
        if at.size > room:  # the size is fixed: the others are clipped to the ends of their grids
            at, lost, saturated = _crowd_out(grids, self.group, room)
        positions, values = np.zeros(room, np.int64), np.zeros(room, np.float32)
        positions[: at.size], values[: at.size] = at, lost
        kind = self._parts(n)[1]
        parts = [
            grids.bases.astype("<f4", copy=False),
            np.array([at.size], "<u8"),
            positions.astype(kind),
            values.astype("<f4", copy=False),
            grids.steps.astype("<u2", copy=False),
            grids.codes,
        ]
        return self._measured(frame.seal(self, n, parts, (0.0, 0.0), saturated), array)

    def _seal_paper(self, array: Floats, stream: lorenzo.Stream) -> Payload:
        parts = [
            np.frombuffer(_COUNTS.pack(len(stream.coded), stream.at.size), np.uint8),
            stream.at.astype("<u8").view(np.uint8),
            stream.values.astype("<f4").view(np.uint8),
            np.frombuffer(stream.coded, np.uint8),
        ]
        body = np.concatenate(parts)
        # Not frame.seal, which needs to know the size in advance.
        buffer = np.zeros(frame.framed_bytes(body.size), np.uint8)
        buffer[HEADER_BYTES : HEADER_BYTES + body.size] = body
        payload = Payload.seal(buffer, codec_id=self.codec_id, n=array.size, settings=self.settings)
        return self._measured(payload, array)

    def _measured(self, payload: Payload, array: Floats) -> Payload:
        # Decodes the payload, which takes as long as encoding.
        losses = frame.losses(array, self._decode(payload)) if self.measure else (None, None)
        return replace(payload, energy=losses[0], error=losses[1])

    def _decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        n = frame.check_payloads(self, payloads, fixed_size=self.form == "fixed")
        if len(payloads) == 1:  # summing from 0 would lose the signs of zeros
            return self._decode(payloads[0])
        return frame.mean((self._decode(payload) for payload in payloads), n, len(payloads))

    def _decode(self, payload: Payload) -> Floats:
        n, body = payload.n, payload.body
        if self.form == "paper":
            size, count = _COUNTS.unpack(frame.read(body, 0, 16, "u1").tobytes().ljust(16, b"\0"))
            end = 16 + 12 * count + size
            # Deflate expands a byte to at most 1032 (a run of 258 in two bits), and each element is
            # a symbol of one byte: so n is bounded by the actual bytes.
            if not body.size - 16 < end <= body.size or n > 1032 * size:
                raise PayloadError(
                    f"{size} bytes of symbols and {count} escapes for {n} elements do not fill a "
                    f"body of {body.size} bytes: the payload is damaged"
                )
            out = lorenzo.unpack(body[end - size : end].tobytes(), n, self._bound)
            at = frame.read(body, 16, count, "<u8")
            values = frame.read(body, 16 + 8 * count, count, "<f4")
        else:
            (bases_at, count_at, at_at, values_at, steps_at, codes_at, end), kind = self._parts(n)
            ng = codes.bucket_count(n, self.group)
            count = int(frame.read(body, count_at, 1, "<u8")[0])
            if count > self.room(n):
                raise PayloadError(f"{count} elements escape; there is room for {self.room(n)}")
            bases = frame.read(body, bases_at, ng, "<f4")
            steps = frame.read(body, steps_at, ng, "<u2")
            out = self._values(bases, steps, body[codes_at:end], n)
            at = frame.read(body, at_at, count, kind)
            values = frame.read(body, values_at, count, "<f4")
        # Strictly ascending, so that no position repeats; then only the last needs a range check.
        if count and (int(at[-1]) >= n or not (at[1:] > at[:-1]).all()):
            raise PayloadError(
                f"positions of escaped elements do not ascend strictly below {n}: it is damaged"
            )
        out[at] = values
        return out


def _crowd_out(
    grids: groups.Grids, group: int, room: int
) -> tuple[npt.NDArray[np.int64], Floats, int]:
    """Return the escapes that fit, and how many finite ones were dropped.

    Non-finite ones come first, as only escapes can hold them; if even these are too many, their
    groups become NaN, which is written into `grids`.
    """
    at, lost = grids.at, grids.values
    finite = np.isfinite(lost)
    if (~finite).sum() > room:
        # Codes represent only finite numbers: without an escape a NaN would become one.
        broken = np.unique(at[~finite] // group)
        grids.bases[broken] = np.nan
        grids.steps[broken] = _NAN_STEP
        outside = ~np.isin(at // group, broken)
        at, lost = at[outside], lost[outside]
        finite = np.ones(at.size, bool)
    free = room - int((~finite).sum())
    chosen = ~finite | (np.cumsum(finite) <= free)
    return at[chosen], lost[chosen], int((~chosen).sum())
