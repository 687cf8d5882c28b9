"""FFTCodec on tensors that are on a GPU: the same bytes, made where the tensor is.

Blocks of up to 8192 go through the fused kernels, one launch for all blocks of one length, of up
to 48 tensors. Larger blocks and whole vectors go through cuFFT and `ops/whole.py`.

Nothing here waits for the device. So a payload's `saturated`, `energy` and `error` are not known
on the host (the header has the first), and a damaged payload decodes to NaN where an error would
need waiting: `raise_if_damaged` asks, once a step, say. `Encoder` and `Decoder` allocate when they
are made and only launch when they run, so a run over blocks may be captured in a CUDA graph.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _cuda
from ..contract import HEADER_BYTES, MAGIC, VERSION, Payload
from ..errors import CompressError, PayloadError
from ..ops import launch, quantize, whole
from ..ops.launch import Format, Piece, Sheet

if TYPE_CHECKING:
    from .blocks import Section
    from .fft import FFTCodec

_HEADER_WORDS = HEADER_BYTES // 4
_flags: dict[int, Any] = {}  # by device: u32 [1] on it, raised by decoding


def holds(tensor: Any) -> bool:
    """Whether this is a tensor on a CUDA device."""
    return _cuda.on_device(tensor)


def new_state(codec: FFTCodec, like: Any, dtype: str = "float32") -> list[Any]:
    """Zero memory for encoding tensors like this one, on its device.

    One [blocks, bins * parts] CuPy array per section: float32, or uint16 that holds bfloat16.
    """
    if dtype not in ("float32", "bfloat16"):
        raise CompressError(f"memory of dtype {dtype!r}; expected 'float32' or 'bfloat16'")
    vector = _cuda.view(like)
    kind = "float32" if dtype == "float32" else "uint16"
    with vector.run().context() as xp:
        return [
            xp.zeros((s.count, s.layout.bins * s.layout.parts), kind)
            for s in codec.sections(vector.elements)
        ]


def to_host(state: Sequence[Any]) -> list[Any]:
    """A copy of a memory, wherever it is, as NumPy float32; waits for the device."""
    parts = [part.get() if holds(part) else part.copy() for part in state]
    return [
        (p.astype(np.uint32) << 16).view(np.float32) if p.dtype == np.uint16 else p for p in parts
    ]


def to_device(state: Sequence[Any], like: Any) -> list[Any]:
    """The memory on the device of `like`; copied only if it is not on a device yet."""
    with _cuda.view(like).run().context() as xp:
        return [part if holds(part) else xp.asarray(part) for part in state]


def encode(
    codec: FFTCodec, tensor: Any, state: list[Any] | None = None, decay: float = 1.0
) -> Payload:
    """FFTCodec.encode for a tensor on a GPU; the payload stays there."""
    return Encoder(codec, [tensor], None if state is None else [state]).run(decay)[0]


def decode_mean(codec: FFTCodec, payloads: Sequence[Payload], out: Any = None) -> Any:
    """FFTCodec.decode_mean for payloads on a GPU.

    Returns `out`; or float32 in the framework of the first payload, a CuPy array if that is not
    known, made on the stream that framework works on now.
    """
    n = payloads[0].n
    buffers: list[Any] = [payload.buffer for payload in payloads]
    if out is None:
        out = _cuda.empty(n, int(buffers[0].device.id), payloads[0].framework)
    Decoder(codec, [_side_by_side(buffers)], [out]).run()
    return out


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
        codec: FFTCodec,
        tensors: Sequence[Any],
        states: Sequence[list[Any]] | None = None,
        buffers: Sequence[Any] | None = None,
    ) -> None:
        _check_codec(codec)
        if not tensors:
            raise CompressError("an Encoder needs at least one tensor; got none")
        self.codec = codec
        self._views = [_checked(tensor) for tensor in tensors]
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
            Sheet(
                buffer=int(buffer.data.ptr),
                totals=self._total(i),
                words=buffer.size // 4,
                used=_used_words(codec, view.elements),
                header=_header(codec, view.elements),
            )
            for i, (view, buffer) in enumerate(zip(self._views, self.buffers, strict=True))
        ]
        if states is not None:
            for view, state in zip(self._views, states, strict=True):
                _check_state(codec, state, view.elements)

    def run(self, decay: float = 1.0) -> list[Payload]:
        """Encode; on the stream that the tensors' framework works on now."""
        device = self._views[0].run()
        launch.open_payloads(device, self._sheets)
        top = _top(self.codec)
        pieces: dict[Format, list[Piece]] = defaultdict(list)
        sources = [self._prepared(device, view) for view in self._views]  # alive until launched
        for i, (view, source) in enumerate(zip(self._views, sources, strict=True)):
            for at, section in enumerate(self.codec.sections(view.elements)):
                memory = None if self._states is None else self._states[i][at]
                form = Format.of(section.layout, _blockwise(self.codec))
                if form.fits_block:
                    pieces[form].append(self._piece(i, source, section, memory))
                else:
                    self._encode_whole(device, form, i, source, section, memory, decay, top)
        for form, rows in pieces.items():
            launch.encode_blocks(device, form, rows, decay=decay, top=top)
        launch.seal_payloads(device, self._sheets)
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
            first_word=_HEADER_WORDS + section.words_at,
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
                    first_word=_HEADER_WORDS + at,
                    memory=0 if memory is None else int(memory[row].data.ptr),
                    memory_dtype=_memory_dtype(memory),
                )
                words = self._word(i, at)
                whole.encode_whole(device, form, vector, words, decay=decay, top=top)

    def _word(self, i: int, at: int) -> int:
        return int(self.buffers[i].data.ptr) + HEADER_BYTES + 4 * at

    def _total(self, i: int) -> int:
        return int(self._totals.data.ptr) + 16 * i


class Decoder:
    """Writes the means of the payloads in the same places as often as it runs.

    Parameters
    ----------
    codec : what made them
    gathered : per tensor the payloads of all ranks, uint8 CuPy array [ranks, nbytes]
    outs : vectors of float32, float16 or bfloat16 to write, on the same device
    """

    def __init__(self, codec: FFTCodec, gathered: Sequence[Any], outs: Sequence[Any]) -> None:
        _check_codec(codec)
        self.codec, self._gathered = codec, list(gathered)
        self._views = [_checked(out) for out in outs]
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
            Sheet(
                buffer=int(buffer.data.ptr),
                totals=self._total(i),
                words=buffer.shape[1] // 4,
                used=_used_words(codec, view.elements),
                header=_header(codec, view.elements),
                flags=self._flag,
                rank_words=buffer.strides[0] // 4,
            )
            for i, (view, buffer) in enumerate(zip(self._views, self._gathered, strict=True))
        ]

    def run(self) -> None:
        """Decode; on the stream that the outputs' framework works on now."""
        device = self._views[0].run()
        launch.open_checks(device, self._sheets, self.ranks)
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
        launch.check_payloads(device, self._sheets, self.ranks)

    def _decode(
        self,
        device: _cuda.CudaDevice,
        i: int,
        target: _cuda.View,
        pieces: dict[Format, list[Piece]],
    ) -> None:
        """Decode tensor i, or leave its blocks in `pieces` for a common launch."""
        for section in self.codec.sections(target.elements):
            form = Format.of(section.layout, _blockwise(self.codec))
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
            first_word=_HEADER_WORDS + section.words_at,
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
                    first_word=_HEADER_WORDS + at,
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


def _check_codec(codec: FFTCodec) -> None:
    if codec.window == "payload":
        raise CompressError(
            'window="payload" on a GPU, where the largest magnitude of all blocks would take a '
            'second pass; expected window="block" or a number'
        )


def _checked(tensor: Any) -> _cuda.View:
    view = _cuda.view(tensor)
    if view.dtype not in launch.DTYPES:
        raise CompressError(
            f"cannot encode dtype {view.dtype}; expected float32, float16 or bfloat16. "
            "Cast it: tensor.float()."
        )
    return view


def _check_state(codec: FFTCodec, state: list[Any], n: int) -> None:
    shapes = [(s.count, s.layout.bins * s.layout.parts) for s in codec.sections(n)]
    dtypes = {str(part.dtype) for part in state}
    device = all(_cuda.on_device(part) for part in state)
    if not device or [part.shape for part in state] != shapes or dtypes - {"float32", "uint16"}:
        raise CompressError(
            f"state of shapes {[part.shape for part in state]} and dtypes {sorted(dtypes)}; "
            f"expected {shapes} of float32 (or uint16 for bfloat16) on the tensor's device. Make "
            "it with new_state(n, like=tensor)."
        )


def _header(codec: FFTCodec, n: int) -> bytes:
    """The part of the header that follows from codec and size."""
    return struct.pack("<2sBBQ", MAGIC, VERSION, codec.codec_id, n) + codec.settings


def _used_words(codec: FFTCodec, n: int) -> int:
    return _HEADER_WORDS + sum(s.count * s.layout.words for s in codec.sections(n))


def _blockwise(codec: FFTCodec) -> str:
    return "identity" if codec.transform == "axes" else codec.transform


def _memory_dtype(memory: Any) -> str:
    return "bfloat16" if memory is not None and str(memory.dtype) == "uint16" else "float32"


def _top(codec: FFTCodec) -> int | None:
    if not isinstance(codec.window, (int, float)):
        return None
    peak = np.float32(codec.window).view(np.uint32)
    return int(quantize.window_top(peak, codec.mantissa))


def _side_by_side(buffers: list[Any]) -> Any:
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


def _forward(xp: Any, source: _cuda.View, section: Section, form: Format) -> Any:
    """[count, bins * parts] float32; the array is ours to overwrite."""
    blocks = xp.zeros(section.count * form.block, "float32")
    blocks[: section.stop - section.start] = source.array()[section.start : section.stop]
    blocks = blocks.reshape(section.count, form.block)
    if form.transform == "fft":
        spectrum = _cuda.fft().rfft(blocks, axis=-1, norm="ortho")
        return spectrum.astype("complex64", copy=False).view("float32")
    if form.transform == "dct":
        return xp.ascontiguousarray(_cuda.fft().dct(blocks, axis=-1, norm="ortho"))
    if form.transform == "identity":
        return blocks
    raise CompressError(
        f"transform={form.transform!r} of {form.block} elements on a GPU; expected blocks of "
        f"{launch.SMALLEST} to {launch.LARGEST}. Choose a smaller block."
    )


def _inverse(coefs: Any, form: Format) -> Any:
    if form.transform == "fft":
        return _cuda.fft().irfft(coefs.view("complex64"), n=form.block, axis=-1, norm="ortho")
    if form.transform == "dct":
        return _cuda.fft().idct(coefs, axis=-1, norm="ortho")
    return coefs
