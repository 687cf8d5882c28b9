"""Encoder: the same tensors on a GPU, encoded in the same places as often as it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base.errors import CompressError
from ...devices import _cuda
from ...devices.arrays import on_cuda
from ...ops.cuda import launch, seal, whole
from ...ops.cuda.launch import Format, Piece
from ...ops.records import quantize
from ...ops.spectra import spans
from ..base import HEADER_BYTES, Payload
from ._device_vector import HEADER_WORDS, Coder, blockwise, check_codec, checked, header, used_words
from .blocks import Section


class Encoder:
    """Encodes the same tensors, in place in memory, as often as it runs.

    Parameters
    ----------
    codec : what to do
    tensors : vectors of float32, float16 or bfloat16 on one device; read at each run
    states : their memories as new_state makes them, or None
    buffers : uint8 CuPy arrays for the payloads, or None to have them made
    """

    def __init__(
        self,
        codec: Coder,
        tensors: Sequence[Any],
        states: Sequence[list[Any]] | None = None,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        check_codec(codec)
        if not tensors:
            raise CompressError("an Encoder needs at least one tensor; got none")
        self.codec = codec
        self._views = [checked(tensor) for tensor in tensors]
        self._states = states
        sizes = [codec.payload_bytes(view.elements) for view in self._views]
        with self._views[0].run().context() as xp:
            self._totals = xp.empty((len(tensors), 2), "uint64")
            self.buffers = list(buffers or [xp.empty(size, "uint8") for size in sizes])
        if [buffer.size for buffer in self.buffers] != sizes:
            raise CompressError(
                f"payload buffers of {[b.size for b in self.buffers]} bytes; expected {sizes}"
            )
        self._sheets = [
            seal.Sheet(
                buffer=int(buffer.data.ptr),
                totals=self._total(i),
                words=buffer.size // 4,
                used=used_words(codec, view.elements),
                header=header(codec, view.elements),
            )
            for i, (view, buffer) in enumerate(zip(self._views, self.buffers, strict=True))
        ]
        if states is not None:
            for view, state in zip(self._views, states, strict=True):
                _check_state(codec, state, view.elements)

    def run(self, decay: float = 1.0) -> list[Payload]:
        """Encode; on the stream that the tensors' framework works on now."""
        device = self._views[0].run()
        seal.open_payloads(device, self._sheets)
        top = _top(self.codec)
        pieces: dict[Format, list[Piece]] = defaultdict(list)
        sources = [self._prepared(device, view) for view in self._views]  # alive until launched
        for i, (view, source) in enumerate(zip(self._views, sources, strict=True)):
            for at, section in enumerate(self.codec.sections(view.elements)):
                memory = None if self._states is None else self._states[i][at]
                form = Format.of(section.layout, blockwise(self.codec), self.codec.span)
                if form.fits_block:
                    pieces[form].append(self._piece(i, source, section, memory))
                else:
                    self._encode_whole(device, form, i, source, section, memory, decay, top)
        for form, rows in pieces.items():
            launch.encode_blocks(device, form, rows, decay=decay, top=top)
        seal.seal_payloads(device, self._sheets)
        return [
            Payload(
                buffer,
                self.codec.codec_id,
                view.elements,
                self.codec.settings,
                framework=view.framework,
            )
            for view, buffer in zip(self._views, self.buffers, strict=True)
        ]

    def _prepared(self, device: _cuda.CudaDevice, view: _cuda.View) -> _cuda.View:
        """The vector as the blocks take it: cast to half precision, or turned along axes."""
        codec = self.codec
        if not codec.half and codec.transform != "axes":
            return view
        with device.context():
            array = view.array()
            if codec.half:
                array = array.astype("float16")
            if codec.transform == "axes":
                tensor = array.astype("float32", copy=False).reshape(codec.shape)
                array = _cuda.fft().dctn(tensor, axes=codec.axes, norm="ortho").reshape(-1)
            return _cuda.view(array)

    def _piece(self, i: int, source: _cuda.View, section: Section, memory: Any) -> Piece:
        size = 4 if source.dtype == "float32" else 2
        return Piece(
            values=source.address + section.start * size,
            dtype=source.dtype,
            elements=section.stop - section.start,
            blocks=section.count,
            words=self._word(i, section.words_at),
            first_word=HEADER_WORDS + section.words_at,
            totals=self._total(i),
            memory=0 if memory is None else int(memory.data.ptr),
            memory_dtype=_memory_dtype(memory),
        )

    def _encode_whole(
        self, device: _cuda.CudaDevice, form: Format, i: int, source: _cuda.View,
        section: Section, memory: Any, decay: float, top: int | None,
    ) -> None:  # fmt: skip
        with device.context() as xp:
            coefs = _forward(xp, source, section, form)
            scratch = xp.empty(whole.scratch_bytes(form), "uint8")
            for row in range(section.count):
                at = section.words_at + row * form.words
                vector = whole.Vector(
                    coefs=int(coefs[row].data.ptr),
                    scratch=int(scratch.data.ptr),
                    totals=self._total(i),
                    first_word=HEADER_WORDS + at,
                    memory=0 if memory is None else int(memory[row].data.ptr),
                    memory_dtype=_memory_dtype(memory),
                )
                words = self._word(i, at)
                whole.encode_whole(device, form, vector, words, decay=decay, top=top)

    def _word(self, i: int, at: int) -> int:
        return int(self.buffers[i].data.ptr) + HEADER_BYTES + 4 * at

    def _total(self, i: int) -> int:
        return int(self._totals.data.ptr) + 16 * i


def _check_state(codec: Coder, state: list[Any], n: int) -> None:
    shapes = [(s.count, s.layout.bins * s.layout.parts) for s in codec.sections(n)]
    dtypes = {str(part.dtype) for part in state}
    device = all(on_cuda(part) for part in state)
    if not device or [part.shape for part in state] != shapes or dtypes - {"float32", "uint16"}:
        raise CompressError(
            f"state of shapes {[part.shape for part in state]} and dtypes {sorted(dtypes)}; "
            f"expected {shapes} of float32 (or uint16 for bfloat16) on the tensor's device. Make "
            "it with new_state(n, like=tensor)."
        )


def _memory_dtype(memory: Any) -> str:
    return "bfloat16" if memory is not None and str(memory.dtype) == "uint16" else "float32"


def _top(codec: Coder) -> int | None:
    if not isinstance(codec.window, (int, float)):
        return None
    peak = np.float32(codec.window).view(np.uint32)
    return int(quantize.window_top(peak, codec.mantissa))


def _forward(xp: Any, source: _cuda.View, section: Section, form: Format) -> Any:
    """[count, bins * parts] float32; the array is ours to overwrite."""
    blocks = xp.zeros(section.count * form.block, "float32")
    blocks[: section.stop - section.start] = source.array()[section.start : section.stop]
    blocks = blocks.reshape(section.count, form.block)
    if form.transform == "fft":
        rows = blocks.reshape(-1, form.span)
        spectrum = _cuda.fft().rfft(rows, axis=-1, norm="ortho")
        bins = spectrum.astype("complex64", copy=False).view("float32")
        return bins if form.span == form.block else spans.join(bins, form.block)
    if form.transform == "dct":
        return xp.ascontiguousarray(_cuda.fft().dct(blocks, axis=-1, norm="ortho"))
    if form.transform == "identity":
        return blocks
    raise CompressError(
        f"transform={form.transform!r} of {form.block} elements on a GPU; expected blocks of "
        f"{launch.SMALLEST} to {launch.LARGEST}. Choose a smaller block."
    )
