"""Decoder: the means of payloads on a GPU, written in the same places as often as it runs.

It waits for nothing, so what is damaged raises a flag, for which `raise_if_damaged` asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...base.errors import PayloadError
from ...devices import _cuda
from ...ops.cuda import launch, seal, whole
from ...ops.cuda.launch import Format, Piece
from ...ops.spectra import spans
from ..base import HEADER_BYTES
from ._device_vector import HEADER_WORDS, Coder, blockwise, check_codec, checked, header, used_words
from .blocks import Section

_flags: dict[int, Any] = {}  # by device: u32 [1] on it, raised by decoding


class Decoder:
    """Writes the means of the payloads in the same places as often as it runs.

    Parameters
    ----------
    codec : what made them
    gathered : per tensor the payloads of all ranks, uint8 CuPy array [ranks, nbytes]
    outs : vectors of float32, float16 or bfloat16 to write, on the same device
    """

    def __init__(self, codec: Coder, gathered: Sequence[Any], outs: Sequence[Any]) -> None:
        check_codec(codec)
        self.codec, self._gathered = codec, list(gathered)
        self._views = [checked(out) for out in outs]
        self.ranks = int(self._gathered[0].shape[0])
        for buffer, view in zip(self._gathered, self._views, strict=True):
            expected = (self.ranks, codec.payload_bytes(view.elements))
            rows = buffer.strides[0] % 4 == 0 and buffer.strides[1] == 1
            if buffer.shape != expected or not rows or int(buffer.data.ptr) % 4:
                raise PayloadError(
                    f"payloads of shape {buffer.shape} for {view.elements} elements; expected "
                    f"{expected}, rows contiguous and aligned to four bytes. Were they cut?"
                )
        device = self._views[0].run()
        with device.context() as xp:
            self._totals = xp.empty((len(self._views), self.ranks), "uint64")
            if device.device not in _flags:
                _flags[device.device] = xp.zeros(1, "uint32")
                device.stream.synchronize()  # other streams raise flags, too
        self._flag = int(_flags[device.device].data.ptr)
        self._sheets = [
            seal.Sheet(
                buffer=int(buffer.data.ptr),
                totals=self._total(i),
                words=buffer.shape[1] // 4,
                used=used_words(codec, view.elements),
                header=header(codec, view.elements),
                flags=self._flag,
                rank_words=buffer.strides[0] // 4,
            )
            for i, (view, buffer) in enumerate(zip(self._views, self._gathered, strict=True))
        ]

    def run(self) -> None:
        """Decode; on the stream that the outputs' framework works on now."""
        device = self._views[0].run()
        seal.open_checks(device, self._sheets, self.ranks)
        pieces: dict[Format, list[Piece]] = defaultdict(list)
        for i, view in enumerate(self._views):
            if self.codec.transform != "axes":
                self._decode(device, i, view, pieces)
                continue
            with device.context() as xp:
                target = _cuda.view(xp.empty(view.elements, "float32"))
            self._decode(device, i, target, pieces)
            self._launch(device, pieces)
            self._from_axes(device, target, view)
        self._launch(device, pieces)
        seal.check_payloads(device, self._sheets, self.ranks)

    def _decode(
        self,
        device: _cuda.CudaDevice,
        i: int,
        target: _cuda.View,
        pieces: dict[Format, list[Piece]],
    ) -> None:
        """Decode tensor i, or leave its blocks in `pieces` for a common launch."""
        for section in self.codec.sections(target.elements):
            form = Format.of(section.layout, blockwise(self.codec), self.codec.span)
            if form.fits_block:
                pieces[form].append(self._piece(i, target, section))
            else:
                self._decode_whole(device, form, i, target, section)

    def _launch(self, device: _cuda.CudaDevice, pieces: dict[Format, list[Piece]]) -> None:
        for form, rows in pieces.items():
            launch.decode_blocks(device, form, rows, ranks=self.ranks, weight=1 / self.ranks)
        pieces.clear()

    def _piece(self, i: int, target: _cuda.View, section: Section) -> Piece:
        size = 4 if target.dtype == "float32" else 2
        return Piece(
            values=target.address + section.start * size,
            dtype=target.dtype,
            elements=section.stop - section.start,
            blocks=section.count,
            words=self._word(i, 0, section.words_at),
            first_word=HEADER_WORDS + section.words_at,
            totals=self._total(i),
            memory=self._flag,
            rank_words=self._gathered[i].strides[0] // 4,
        )

    def _decode_whole(
        self, device: _cuda.CudaDevice, form: Format, i: int, target: _cuda.View, section: Section
    ) -> None:
        with device.context() as xp:
            coefs = xp.zeros((section.count, form.bins * form.parts), "float32")
            scratch = xp.empty(whole.scratch_bytes(form), "uint8")
            for row in range(section.count):
                at = section.words_at + row * form.words
                vector = whole.Vector(
                    coefs=int(coefs[row].data.ptr),
                    scratch=int(scratch.data.ptr),
                    totals=self._total(i),
                    first_word=HEADER_WORDS + at,
                    flags=self._flag,
                )
                words = [self._word(i, rank, at) for rank in range(self.ranks)]
                whole.decode_whole(device, form, vector, words, weight=1 / self.ranks)
            values = _inverse(coefs, form).reshape(-1)[: section.stop - section.start]
            target.store(section.start, values)

    def _from_axes(self, device: _cuda.CudaDevice, source: _cuda.View, view: _cuda.View) -> None:
        codec = self.codec
        with device.context():
            tensor = source.owner.reshape(codec.shape)
            values = _cuda.fft().idctn(tensor, axes=codec.axes, norm="ortho").reshape(-1)
            view.store(0, values)

    def _word(self, i: int, rank: int, at: int) -> int:
        buffer = self._gathered[i]
        return int(buffer.data.ptr) + rank * int(buffer.strides[0]) + HEADER_BYTES + 4 * at

    def _total(self, i: int) -> int:
        return int(self._totals.data.ptr) + 8 * self.ranks * i


def damage_of(device: int) -> Any:
    """The flag that decoding on a device raises and `raise_if_damaged` lowers, u32 [1] there."""
    return _flags[device]


def raise_if_damaged(device: int = 0) -> None:
    """Raise PayloadError if anything decoded since the last call was damaged; waits for it."""
    if device not in _flags:
        return
    with _cuda.cupy().cuda.Device(device) as chosen:
        chosen.synchronize()  # whatever stream it was decoded on
        found = int(_flags[device].get()[0])
        _flags[device].fill(0)
    said = [text for bit, text in _DAMAGE.items() if found & bit]
    if said:
        raise PayloadError(
            f"decoded on CUDA device {device}: {' and '.join(said)}; expected payloads of this "
            "codec, settings and size, undamaged. The blocks concerned hold NaN. Use one version "
            "and the same settings on all ranks."
        )


_DAMAGE = {
    1: "a record with a range that is not finite or positions out of order",
    2: "a header of another codec, other settings or another number of elements",
    4: "a checksum that does not match its bytes",
}


def side_by_side(buffers: list[Any]) -> Any:
    """Payloads as [ranks, nbytes]: as they lie if evenly spaced in one array, else copied."""
    xp, first = _cuda.cupy(), buffers[0]
    base = first.base if first.base is not None else first
    places = [int(buffer.data.ptr) for buffer in buffers]
    steps = {b - a for a, b in pairwise(places)} or {first.size}
    one = all((buffer.base if buffer.base is not None else buffer) is base for buffer in buffers)
    if one and len(steps) == 1 and min(steps) >= first.size:
        strides = (min(steps), 1)
        return xp.lib.stride_tricks.as_strided(first, (len(buffers), first.size), strides)
    return xp.stack(buffers)


def _inverse(coefs: Any, form: Format) -> Any:
    if form.transform == "fft":
        bins = coefs if form.span == form.block else spans.part(coefs, form.span)
        rows = _cuda.fft().irfft(bins.view("complex64"), n=form.span, axis=-1, norm="ortho")
        return rows.reshape(-1, form.block)
    if form.transform == "dct":
        return _cuda.fft().idct(coefs, axis=-1, norm="ortho")
    return coefs
