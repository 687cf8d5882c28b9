"""FFTCodec for GPU tensors: the same bytes, encoded on the tensor's device.

Vectors in blocks of up to 8192 use the fused kernels, with one launch for all blocks of the same
length, of up to 48 tensors. Larger blocks and whole vectors use the array code of `batched.py`,
whose FFT is cuFFT.

Nothing here waits for the device. So a payload's `saturated`, `energy` and `error` are not known on
the host (the header has the first), and a corrupt payload decodes to NaN, as an error would need to
wait; call `raise_if_damaged`, e.g. once per step. For tensors that use the kernels, `Encoder` and
`Decoder` allocate when created and only launch when run, so a CUDA graph may capture a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .. import _cuda, arrays
from ..arrays import on_cuda
from ..errors import CompressError, PayloadError
from ..ops import launch
from ..ops.launch import Format, Piece
from . import batched
from .base import HEADER_BYTES, Payload
from .fft_settings import (
    HEADER_WORDS,
    Coder,
    Section,
    blockwise,
    fixed_top,
    header,
    used_words,
)

# By device: u32 [1] on it, set by decoding and read later: to raise an error immediately, each
# decoding would have to wait for the device.
_flags: dict[int, Any] = {}
_DAMAGE = {
    1: "a record with a range that is not finite or positions out of order",
    2: "a header of another codec, other settings or another number of elements",
    4: "a checksum that does not match its bytes",
    8: "a header, a checksum or a record that is not one of this codec",  # the array code's
}


def new_state(codec: Coder, like: Any) -> list[Any]:
    """Return zero memory for encoding tensors like this one, on its device.

    One [blocks, bins * parts] float32 CuPy array per section.
    """
    vector = _cuda.view(like)
    with vector.run().context() as xp:
        shapes = batched.memory_shapes(codec, vector.elements)
        return [xp.zeros(shape, "float32") for shape in shapes]


def to_device(state: Sequence[Any], like: Any) -> list[Any]:
    """Move the memory to the device of `like`; copies only if it is not on a device yet."""
    with _cuda.view(like).run().context() as xp:
        return [part if on_cuda(part) else xp.asarray(part) for part in state]


def encode(
    codec: Coder, tensor: Any, state: list[Any] | None = None, decay: float = 1.0
) -> Payload:
    """FFTCodec.encode for a tensor on a GPU; the payload stays there."""
    return Encoder(codec, [tensor], None if state is None else [state]).run(decay)[0]


def decode_mean(codec: Coder, payloads: Sequence[Payload], out: Any = None) -> Any:
    """FFTCodec.decode_mean for payloads on a GPU.

    Returns `out`; or float32 in the framework of the first payload (a CuPy array if unknown),
    computed on that framework's current stream.
    """
    n = payloads[0].n
    buffers: list[Any] = [payload.buffer for payload in payloads]
    if out is None:
        out = _cuda.empty(n, int(buffers[0].device.id), payloads[0].framework)
    Decoder(codec, [side_by_side(buffers)], [out]).run()
    return out


class Encoder:
    """Encodes the same tensors, at the same addresses, each time it runs.

    Parameters
    ----------
    codec : the codec
    tensors : vectors of float32, float16 or bfloat16 on one device; read at each run
    states : their memories, from new_state, or None
    buffers : uint8 CuPy arrays for the payloads; None to allocate them
    """

    def __init__(
        self,
        codec: Coder,
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
        # Array code writes whole payloads, including header and checksum: others need sheets.
        self._by_kernels = [_fit_kernels(codec, view.elements) for view in self._views]
        self._sheets = [
            launch.Sheet(
                buffer=int(self.buffers[i].data.ptr),
                totals=self._total(i),
                words=self.buffers[i].size // 4,
                used=used_words(codec, self._views[i].elements),
                header=header(codec, self._views[i].elements),
            )
            for i in np.flatnonzero(self._by_kernels).tolist()
        ]
        if states is not None:
            for view, state in zip(self._views, states, strict=True):
                _check_state(codec, state, view.elements)

    def run(self, decay: float = 1.0) -> list[Payload]:
        """Encode, on the current stream of the tensors' framework."""
        device = self._views[0].run()
        # Headers and zeroed counters first: blocks add their clipped values and their part of the
        # checksum to the counters, and sealing reads them last. All on one stream, so in this
        # order.
        launch.open_payloads(device, self._sheets)
        top = fixed_top(self.codec)
        pieces: dict[Format, list[Piece]] = defaultdict(list)
        sources = []  # alive until launched
        for i, (view, by_kernels) in enumerate(zip(self._views, self._by_kernels, strict=True)):
            if not by_kernels:
                self._encode_as_arrays(device, i, view, decay)
                continue
            # All pieces of one format in one launch, however many tensors: so they are collected.
            sources.append(self._prepared(device, view))
            for at, section in enumerate(self.codec.sections(view.elements)):
                memory = None if self._states is None else self._states[i][at]
                form = Format.of(section.layout, blockwise(self.codec), self.codec.span)
                address = 0 if memory is None else int(memory.data.ptr)
                words = int(self.buffers[i].data.ptr)
                piece = _piece(sources[-1], section, words, self._total(i), address)
                pieces[form].append(piece)
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

    def _encode_as_arrays(
        self, device: _cuda.CudaDevice, i: int, view: _cuda.View, decay: float
    ) -> None:
        """Encode tensor i by array code; writes its payload and memory where kernels would."""
        state = None if self._states is None else self._states[i]
        with device.context():
            memories = None if state is None else [state]
            encoded = batched.encode(self.codec, [view.array()], memories, decay=decay)
            self.buffers[i].view("int32")[:] = encoded.words
            if state is not None and encoded.memories is not None:
                for part, residual in zip(state, encoded.memories[0], strict=True):
                    part[...] = residual

    def _prepared(self, device: _cuda.CudaDevice, view: _cuda.View) -> _cuda.View:
        """Return the vector as blocks use it: cast to half precision, or transformed along axes."""
        codec = self.codec
        if not codec.half and codec.transform != "axes":
            return view
        with device.context():
            array = view.array()
            if codec.half:
                array = array.astype("float16")
            if codec.transform == "axes":
                tensor = array.astype("float32", copy=False).reshape(codec.shape)
                array = (
                    arrays.scipy_fft(tensor).dctn(tensor, axes=codec.axes, norm="ortho").reshape(-1)
                )
            return _cuda.view(array)

    def _total(self, i: int) -> int:
        return int(self._totals.data.ptr) + 16 * i


def _piece(
    view: _cuda.View, section: Section, payload: int, totals: int, memory: int, rank_words: int = 0
) -> Piece:
    """Return a section of a tensor for a launch; `payload`: address, of rank 0's for decoding."""
    size = 4 if view.dtype == "float32" else 2
    return Piece(
        values=view.address + section.start * size,
        dtype=view.dtype,
        elements=section.stop - section.start,
        blocks=section.count,
        words=payload + HEADER_BYTES + 4 * section.words_at,
        first_word=HEADER_WORDS + section.words_at,
        totals=totals,
        memory=memory,
        rank_words=rank_words,
    )


def _check_state(codec: Coder, state: list[Any], n: int) -> None:
    shapes = batched.memory_shapes(codec, n)
    dtypes = {str(part.dtype) for part in state}
    device = all(on_cuda(part) for part in state)
    if not device or [part.shape for part in state] != shapes or dtypes - {"float32"}:
        raise CompressError(
            f"state of shapes {[part.shape for part in state]} and dtypes {sorted(dtypes)}; "
            f"expected {shapes} of float32 on the tensor's device. Make it with "
            "new_state(n, like=tensor)."
        )


class Decoder:
    """Writes the means of payloads to the same addresses each time it runs.

    Parameters
    ----------
    codec : the one that encoded them
    gathered : per tensor the payloads of all ranks, uint8 CuPy array [ranks, nbytes]
    outs : vectors of float32, float16 or bfloat16 to write, on the same device
    """

    def __init__(self, codec: Coder, gathered: Sequence[Any], outs: Sequence[Any]) -> None:
        _check_codec(codec)
        self.codec, self._gathered = codec, list(gathered)
        self._views = [_checked(out) for out in outs]
        self.ranks = int(self._gathered[0].shape[0])
        for buffer, view in zip(self._gathered, self._views, strict=True):
            expected = (self.ranks, codec.payload_bytes(view.elements))
            # Kernels read 32-bit words, and assume a constant stride between ranks' payloads.
            rows = buffer.strides[0] % 4 == 0 and buffer.strides[1] == 1
            if buffer.shape != expected or not rows or int(buffer.data.ptr) % 4:
                raise PayloadError(
                    f"payloads of shape {buffer.shape} for {view.elements} elements; expected "
                    f"{expected}, rows contiguous and aligned to four bytes. Were they cut?"
                )
        device = self._views[0].run()
        # Allocated here and not in `run`, which a CUDA graph may capture.
        with device.context() as xp:
            self._totals = xp.empty((len(self._views), self.ranks), "uint64")
            if device.device not in _flags:
                _flags[device.device] = xp.zeros(1, "uint32")
                device.stream.synchronize()  # zeroed before another stream sets it
        self._flag = int(_flags[device.device].data.ptr)
        self._by_kernels = [_fit_kernels(codec, view.elements) for view in self._views]
        self._sheets = [
            launch.Sheet(
                buffer=int(self._gathered[i].data.ptr),
                totals=self._total(i),
                words=self._gathered[i].shape[1] // 4,
                used=used_words(codec, self._views[i].elements),
                header=header(codec, self._views[i].elements),
                flags=self._flag,
                rank_words=self._gathered[i].strides[0] // 4,
            )
            for i in np.flatnonzero(self._by_kernels).tolist()
        ]

    def run(self) -> None:
        """Decode, on the current stream of the outputs' framework."""
        device = self._views[0].run()
        launch.open_checks(device, self._sheets, self.ranks)
        pieces: dict[Format, list[Piece]] = defaultdict(list)
        for i, (view, by_kernels) in enumerate(zip(self._views, self._by_kernels, strict=True)):
            if not by_kernels:
                self._decode_as_arrays(device, i, view)
            elif self.codec.transform == "axes":
                # Coefficients are decoded to a temporary and transformed into the output, one
                # tensor at a time: `_from_axes` must follow the launch of its own blocks.
                with device.context() as xp:
                    target = _cuda.view(xp.empty(view.elements, "float32"))
                self._add_pieces(i, target, pieces)
                self._launch(device, pieces)
                self._from_axes(device, target, view)
            else:
                self._add_pieces(i, view, pieces)
        self._launch(device, pieces)
        launch.check_payloads(device, self._sheets, self.ranks)

    def _add_pieces(self, i: int, target: _cuda.View, pieces: dict[Format, list[Piece]]) -> None:
        """Add the blocks of tensor i to a common launch."""
        for section in self.codec.sections(target.elements):
            form = Format.of(section.layout, blockwise(self.codec), self.codec.span)
            words, rank_words = int(self._gathered[i].data.ptr), self._gathered[i].strides[0] // 4
            piece = _piece(target, section, words, self._total(i), self._flag, rank_words)
            pieces[form].append(piece)

    def _decode_as_arrays(self, device: _cuda.CudaDevice, i: int, view: _cuda.View) -> None:
        with device.context() as xp:
            words = xp.ascontiguousarray(self._gathered[i]).view("int32")
            decoded = batched.decode(self.codec, words, [view.elements])
            view.store(0, decoded.means[0])
            flags = _flags[device.device]
            # In place and without a branch: reading `damaged` would wait for the device.
            flags |= decoded.damaged.astype("uint32") * np.uint32(8)

    def _launch(self, device: _cuda.CudaDevice, pieces: dict[Format, list[Piece]]) -> None:
        for form, rows in pieces.items():
            launch.decode_blocks(device, form, rows, ranks=self.ranks, weight=1 / self.ranks)
        pieces.clear()

    def _from_axes(self, device: _cuda.CudaDevice, source: _cuda.View, view: _cuda.View) -> None:
        codec = self.codec
        with device.context():
            tensor = source.owner.reshape(codec.shape)
            values = (
                arrays.scipy_fft(tensor).idctn(tensor, axes=codec.axes, norm="ortho").reshape(-1)
            )
            view.store(0, values)

    def _total(self, i: int) -> int:
        return int(self._totals.data.ptr) + 8 * self.ranks * i


def damage_of(device: int) -> Any:
    """Return the flag that decoding sets and `raise_if_damaged` clears, u32 [1] on the device."""
    return _flags[device]


def raise_if_damaged(device: int = 0) -> None:
    """Raise PayloadError if anything decoded since the last call was corrupt; waits for it."""
    if device not in _flags:
        return
    with _cuda.cupy().cuda.Device(device) as chosen:
        chosen.synchronize()  # whatever stream it was decoded on
        damage = int(_flags[device].get()[0])
        _flags[device].fill(0)
    kinds = [text for bit, text in _DAMAGE.items() if damage & bit]
    if kinds:
        raise PayloadError(
            f"decoded on CUDA device {device}: {' and '.join(kinds)}; expected payloads of this "
            "codec, settings and size, undamaged. The blocks concerned hold NaN. Use one version "
            "and the same settings on all ranks."
        )


def side_by_side(buffers: list[Any]) -> Any:
    """Return payloads as [ranks, nbytes]: a view if evenly spaced in one array, else a copy."""
    xp, first = _cuda.cupy(), buffers[0]
    # Payloads of one gather are rows of one buffer: evenly spaced rows need no copy.
    base = first.base if first.base is not None else first
    places = [int(buffer.data.ptr) for buffer in buffers]
    steps = {b - a for a, b in pairwise(places)} or {first.size}
    one = all((buffer.base if buffer.base is not None else buffer) is base for buffer in buffers)
    if one and len(steps) == 1 and min(steps) >= first.size:
        strides = (min(steps), 1)
        return xp.lib.stride_tricks.as_strided(first, (len(buffers), first.size), strides)
    return xp.stack(buffers)


def _check_codec(codec: Coder) -> None:
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


def _fit_kernels(codec: Coder, n: int) -> bool:
    """Whether the fused kernels support all blocks of n elements; else array code is used."""
    forms = (Format.of(s.layout, blockwise(codec), codec.span) for s in codec.sections(n))
    return all(form.fits_block for form in forms)
