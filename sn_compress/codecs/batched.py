"""FFTCodec over an array namespace: the payloads of many tensors at once, on any device.

    encoded = encode(codec, gradients, memories)      one wire, [words] int32, for an all-gather
    decoded = decode(codec, gathered, sizes)          from [ranks, words] int32 to the means

Produces the same bytes as FFTCodec.encode. Blocks of all tensors with the same layout go through
each function together, so the number of launches does not grow with the number of tensors. No
value is read, no shape depends on one, and no argument is modified: the same code runs in NumPy, in
torch on any device, under a capture, and in a TensorFlow graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..arrays import (
    Array,
    Constant,
    device_of,
    full_fp32_matmul,
    join,
    largest_of_rows,
    namespace,
    put,
    take,
    to_host,
)
from ..errors import CompressError, PayloadError
from ..ops import bits, quantize
from ..ops.checksum import Checksums
from ..ops.quantize import Layout
from ..ops.record_arrays import Records
from ..ops.transforms import OverAxes, Transform
from .fft_settings import HEADER_WORDS, Coder, blockwise, fixed_top, header, used_words

_SATURATED = 6  # header word with the number of clipped values; the words before it are fixed

OptimizerState = Sequence[Array]
"""Memory of one tensor: [blocks, bins * parts] float32 for each section; see memory_shapes."""


@dataclass(frozen=True)
class Encoded:
    """The result of `encode`.

    words : [words] int32, the payloads concatenated
    memories : the next step's, of each tensor; None if there were none
    numbers : [3] float64, summed over all tensors: squared norms of what was encoded and of what
        was lost, both of finite blocks only, and number of clipped values. None without `tally`
    """

    words: Array
    memories: list[list[Array]] | None
    numbers: Array | None


@dataclass(frozen=True)
class Decoded:
    """The result of `decode`.

    means : [n] float32 of each tensor; NaN where any rank's block was not finite, and everywhere if
        any rank's payload of the tensor is corrupt
    damaged : 0-d bool, whether any payload is corrupt; the host may read it later
    """

    means: list[Array]
    damaged: Array


def serves(codec: Coder) -> bool:
    """Whether there is array code for these settings; others raise CompressError."""
    return codec.window != "payload"


def memory_shapes(codec: Coder, n: int) -> list[tuple[int, int]]:
    """Return the shapes of a tensor's memory, one per section."""
    return [section.memory_shape for section in codec.sections(n)]


def memory_on_host(state: Sequence[Any]) -> list[Any]:
    """Copy a memory from any device to NumPy float32; waits for the device."""
    return [np.array(to_host(part)) for part in state]


def new_memory(codec: Coder, n: int, like: Array) -> list[Array]:
    """Return zero memory on the device of `like`."""
    xp, device = namespace(like), device_of(like)
    return [xp.zeros(shape, dtype=xp.float32, device=device) for shape in memory_shapes(codec, n)]


def words_of(codec: Coder, sizes: Sequence[int]) -> int:
    """Return the 4-byte words sent for tensors of these sizes."""
    return sum(codec.payload_bytes(n) for n in sizes) // 4


def encode(
    codec: Coder,
    gradients: Sequence[Array],
    memories: Sequence[OptimizerState] | None = None,
    *,
    decay: float = 1.0,
    unused_waits: bool = False,
    tally: bool = False,
) -> Encoded:
    """Encode at least one tensor.

    gradients : [n] each, all float32, float16 or bfloat16
    memories : of each tensor, from the last step; initially zeros
    decay : factor on the memories before they are added
    unused_waits : the memory of a zero gradient is not sent and does not change
    tally : whether to compute what was lost
    """
    batch = batch_of(codec, tuple(int(gradient.shape[0]) for gradient in gradients))
    # Transforms along axes are matrix products: in TF32 ranks would keep different bins.
    with full_fp32_matmul(gradients[0]):
        return batch.encode(
            gradients, memories, decay=decay, unused_waits=unused_waits, tally=tally
        )


def decode(codec: Coder, gathered: Array, sizes: Sequence[int]) -> Decoded:
    """Return the means of all ranks' payloads.

    gathered : [ranks, words] int32, the result of `encode` on each rank
    sizes : elements of each tensor
    Raises PayloadError if the shape does not match.
    """
    batch = batch_of(codec, tuple(sizes))
    if len(gathered.shape) != 2 or int(gathered.shape[1]) != batch.words:
        raise PayloadError(
            f"gathered words of shape {tuple(gathered.shape)}; expected [ranks, {batch.words}]. Do "
            "all ranks run the same version with the same settings?"
        )
    with full_fp32_matmul(gathered):
        return batch.decode(gathered)


@dataclass(frozen=True)
class _Run:
    """A section of a tensor: the position of its blocks among those of its layout.

    start, stop : its elements; first : its first block; at : its index in the tensor's sections
    """

    tensor: int
    at: int
    start: int
    stop: int
    first: int
    count: int
    words_at: int


@dataclass(frozen=True)
class _Group:
    """All blocks of one layout."""

    records: Records
    transform: Transform
    runs: tuple[_Run, ...]

    @property
    def layout(self) -> Layout:
        return self.records.layout

    @property
    def blocks(self) -> int:
        last = self.runs[-1]
        return last.first + last.count


class Batch:
    """Encodes and decodes tensors of fixed sizes with a codec, with precomputed tables."""

    def __init__(self, codec: Coder, sizes: tuple[int, ...]) -> None:
        self.codec, self.sizes = codec, sizes
        self.axes = OverAxes(codec.shape or (), codec.axes or ())
        nbytes = [codec.payload_bytes(n) for n in sizes]
        self.words = sum(nbytes) // 4
        self.starts = [int(at) // 4 for at in np.cumsum([0, *nbytes])[:-1]]
        self.groups = self._grouped()
        self.checksums = Checksums([size // 4 for size in nbytes])
        heads = [header(codec, n) + bytes(8) for n in sizes]
        # Constants of the batch, not of a step: a graph or capture has them once per device.
        self.heads = Constant(np.frombuffer(b"".join(heads), "<i4").copy())
        places = np.add.outer(self.starts, np.arange(_SATURATED)).reshape(-1)
        self.head_at = Constant(places.astype(np.int64))
        fields = np.frombuffer(b"".join(heads), "<i4").reshape(-1, HEADER_WORDS)[:, :_SATURATED]
        self.fields = Constant(np.ascontiguousarray(fields))
        self.saturated_at = Constant(np.asarray(self.starts, np.int64) + _SATURATED)
        self.top = _top(codec)
        # Blocks are ordered by layout, but tallies are per tensor: a stable sort makes each
        # tensor's blocks contiguous, and differences of a cumulative sum at `ends` are the sums of
        # ragged rows, which no array library supports.
        tensors = [
            np.repeat([r.tensor for r in g.runs], [r.count for r in g.runs]) for g in self.groups
        ]
        self.tensor_of = [Constant(of_group) for of_group in tensors]  # of each block
        of_all = np.concatenate([np.zeros(0, np.int64), *tensors])
        self.by_tensor = Constant(np.argsort(of_all, kind="stable"))
        blocks = np.bincount(of_all, minlength=len(sizes))
        self.ends = Constant(np.cumsum([0, *blocks]))

    def _grouped(self) -> list[_Group]:
        groups: dict[Layout, list[_Run]] = {}
        for tensor, n in enumerate(self.sizes):
            for at, section in enumerate(self.codec.sections(n)):
                runs = groups.setdefault(section.layout, [])
                first = runs[-1].first + runs[-1].count if runs else 0
                place = self.starts[tensor] + HEADER_WORDS + section.words_at
                runs.append(
                    _Run(tensor, at, section.start, section.stop, first, section.count, place)
                )
        return [
            _Group(
                Records(layout),
                Transform(blockwise(self.codec), layout.block, self.codec.span),
                tuple(runs),
            )
            for layout, runs in groups.items()
        ]

    def encode(
        self,
        gradients: Sequence[Array],
        memories: Sequence[OptimizerState] | None = None,
        *,
        decay: float = 1.0,
        unused_waits: bool = False,
        tally: bool = False,
    ) -> Encoded:
        """See `encode`."""
        xp = namespace(gradients[0])
        # Casts to half precision and transforms along axes come first, as in FFTCodec.encode.
        gradients = self._prepared(gradients)
        blocks = [self._blocks(group, gradients) for group in self.groups]
        peaks = [largest_of_rows(values) for values in blocks]
        used = self._used(peaks) if unused_waits and memories is not None else None
        pieces: list[list[tuple[int, Array]]] = [[] for _ in self.sizes]
        residuals: list[list[Array]] = [[None] * len(self.codec.sections(n)) for n in self.sizes]
        saturated, energies, errors = [], [], []
        for place, (group, values) in enumerate(zip(self.groups, blocks, strict=True)):
            memory = None
            if memories is not None:
                memory = join([memories[run.tensor][run.at] for run in group.runs])
            # Blocks near float32's limit are scaled; for all others the factor is 1, as a branch
            # would read a value.
            is_large = xp.astype(quantize.reach(peaks[place], memory), xp.int64)
            down = take(quantize.LARGE_DOWN.on(values), is_large)[:, None]
            factor = down if decay == 1 else down * decay
            # A tensor that no backward pass has reached sends zeros: its memory waits for a step in
            # which it is used, as in the engine's host path.
            if used is not None:
                factor = factor * xp.astype(used[place], xp.float32)[:, None]
            coefficients = group.transform.forward(values * down)
            encoded = group.records.encode(
                coefficients, memory, factor, self.top, tally, is_large, down
            )
            words, residual = bits.as_int32(encoded.words), encoded.residual
            saturated.append(encoded.saturated)
            energies.append(encoded.energy)
            errors.append(encoded.error)
            if used is not None:
                residual = xp.where(used[place][:, None], residual, memory)
            for run in group.runs:
                here = slice(run.first, run.first + run.count)
                pieces[run.tensor].append((run.at, xp.reshape(words[here], (-1,))))
                if residual is not None:
                    residuals[run.tensor][run.at] = residual[here]
        # The checksum covers the count of clipped values, so that is written first.
        wire = self._wire(gradients[0], pieces)
        if self.top is not None:
            counts = xp.astype(self._by_tensor(saturated), xp.int32)
            wire = put(wire, self.saturated_at.on(wire), counts)
        sums = self.checksums.of(wire[None, :])[0]
        wire = put(wire, self.checksums.places.on(wire), sums)
        numbers = None
        if tally:
            # If no tensor has elements there is nothing to sum, and concat rejects an empty list.
            none = [xp.zeros(1, dtype=xp.float64, device=device_of(wire))]
            clipped = [xp.astype(count, xp.float64) for count in saturated]
            totals = [xp.sum(join(parts or none)) for parts in (energies, errors, clipped)]
            numbers = xp.stack(totals)
        return Encoded(wire, None if memories is None else residuals, numbers)

    def decode(self, gathered: Array) -> Decoded:
        """See `decode`."""
        xp, ranks = namespace(gathered), int(gathered.shape[0])
        bad = self._damaged(gathered)  # [ranks, tensors]
        pieces: list[list[Array]] = [[None] * len(self.codec.sections(n)) for n in self.sizes]
        flags, rooms = [], []
        for group in self.groups:
            layout = group.layout
            records = [
                gathered[:, run.words_at : run.words_at + run.count * layout.words]
                for run in group.runs
            ]
            joined = records[0] if len(records) == 1 else xp.concat(records, axis=1)
            # All ranks' records of a layout in one call, in rank order, in which `add` sums.
            words = bits.as_int64(xp.reshape(joined, (ranks * group.blocks, layout.words)))
            decoded = group.records.decode(words, ranks=ranks)
            shape = (group.blocks * layout.bins, layout.parts)
            accum = xp.zeros(shape, dtype=xp.float32, device=device_of(gathered))
            accum = group.records.add(accum, decoded, 1 / ranks)
            values = group.transform.inverse(xp.reshape(accum, (group.blocks, -1)))
            values = quantize.restored(values, decoded.down, quantize.HIGHEST)
            missing = xp.any(xp.reshape(decoded.missing, (ranks, group.blocks)), axis=0)
            rooms.append((values, missing))
            damaged = xp.reshape(decoded.damaged, (ranks, group.blocks))
            flags.append(xp.any(damaged))
        # A payload from any rank with a wrong header or checksum invalidates the whole tensor on
        # every rank: the wrong word may be anywhere. A corrupt record invalidates its block.
        spoilt = xp.any(bad, axis=0)  # [tensors]
        for (values, missing), group, tensor_of in zip(
            rooms, self.groups, self.tensor_of, strict=True
        ):
            missing = missing | take(spoilt, tensor_of.on(spoilt))
            values = xp.where(missing[:, None], xp.full_like(values, float("nan")), values)
            for run in group.runs:
                here = xp.reshape(values[run.first : run.first + run.count], (-1,))
                pieces[run.tensor][run.at] = here[: run.stop - run.start]
        damaged = xp.any(spoilt)
        for flag in flags:
            damaged = damaged | flag
        empty = xp.zeros(0, dtype=xp.float32, device=device_of(gathered))
        means = [join(of_tensor) if of_tensor else empty for of_tensor in pieces]
        return Decoded(self._finished(means), damaged)

    def _prepared(self, gradients: Sequence[Array]) -> Sequence[Array]:
        """Cast to half precision, or transform along axes, if the codec does."""
        codec, xp = self.codec, namespace(gradients[0])
        if codec.half:
            gradients = [xp.astype(gradient, xp.float16) for gradient in gradients]
        if codec.transform != "axes":
            return gradients
        # A codec over axes has a single shape, so its tensors can be stacked.
        stacked = xp.astype(xp.stack(list(gradients)), xp.float32)
        coefficients = self._along_axes(stacked, back=False)
        return [coefficients[at] for at in range(len(gradients))]

    def _finished(self, means: list[Array]) -> list[Array]:
        codec, xp = self.codec, namespace(means[0])
        if codec.transform != "axes":
            return means
        values = self._along_axes(xp.stack(means), back=True)
        return [values[at] for at in range(len(means))]

    def _along_axes(self, stacked: Array, *, back: bool) -> Array:
        xp = namespace(stacked)
        is_large = xp.astype(quantize.is_large(stacked), xp.int64)
        down = take(quantize.LARGE_DOWN.on(stacked), is_large)[:, None]
        return quantize.restored(self.axes.of(stacked * down, back=back), down, quantize.HIGHEST)

    def _blocks(self, group: _Group, gradients: Sequence[Array]) -> Array:
        """Return [blocks, block] float32, the last of each run padded with zeros."""
        like, block = gradients[0], group.layout.block
        xp = namespace(like)
        missing = [run.count * block - (run.stop - run.start) for run in group.runs]
        zeros = xp.zeros(max(missing), dtype=like.dtype, device=device_of(like))
        parts = []
        for run, lacks in zip(group.runs, missing, strict=True):
            parts.append(gradients[run.tensor][run.start : run.stop])
            if lacks:
                parts.append(zeros[:lacks])
        # Joined in the gradients' own dtype, then cast once: two launches in total, not per tensor.
        values = xp.astype(join(parts), xp.float32, copy=False)
        return xp.reshape(values, (group.blocks, block))

    def _used(self, peaks: Sequence[Array]) -> list[Array]:
        """Return for each group, [blocks] bool, whether a block's gradient has a nonzero value."""
        xp = namespace(peaks[0])
        flags = [xp.astype(peak != 0, xp.int64) for peak in peaks]
        used = self._by_tensor(flags) > 0
        return [take(used, tensor_of.on(used)) for tensor_of in self.tensor_of]

    def _by_tensor(self, values: Sequence[Array]) -> Array:
        """Sum the groups' [blocks] int64 by tensor, [tensors] int64."""
        xp = namespace(values[0])
        ordered = take(join(values), self.by_tensor.on(values[0]))
        zero = xp.zeros(1, dtype=xp.int64, device=device_of(ordered))
        sums = xp.concat([zero, xp.cumulative_sum(ordered, axis=0)])
        ends = take(sums, self.ends.on(sums))
        return ends[1:] - ends[:-1]

    def _wire(self, like: Array, pieces: Sequence[list[tuple[int, Array]]]) -> Array:
        """Join headers, records and padding of all tensors, [words] int32."""
        xp = namespace(like)
        heads = self.heads.on(like)
        # A payload is a multiple of 16 bytes, with at most three words of padding.
        padding = xp.zeros(3, dtype=xp.int32, device=device_of(like))
        parts = []
        for tensor, records in enumerate(pieces):
            parts.append(heads[tensor * HEADER_WORDS : (tensor + 1) * HEADER_WORDS])
            parts += [words for _, words in sorted(records, key=lambda piece: piece[0])]
            n = self.sizes[tensor]
            if unused := self.codec.payload_bytes(n) // 4 - used_words(self.codec, n):
                parts.append(padding[:unused])
        return xp.concat(parts)

    def _damaged(self, gathered: Array) -> Array:
        """Find payloads with a different header or a wrong checksum, [ranks, tensors] bool."""
        xp, ranks = namespace(gathered), gathered.shape[0]
        # Magic to settings: the words that are equal in all ranks' headers. The number of clipped
        # values differs.
        heads = xp.take(gathered, self.head_at.on(gathered), axis=1)
        heads = xp.reshape(heads, (ranks, len(self.sizes), _SATURATED))
        other = xp.any(heads != self.fields.on(gathered)[None], axis=2)
        sums = xp.take(gathered, self.checksums.places.on(gathered), axis=1)
        return other | (sums != self.checksums.of(gathered))


@lru_cache(maxsize=64)
def batch_of(codec: Coder, sizes: tuple[int, ...]) -> Batch:
    """Return the cached batch for a codec and sizes; create it before capturing a step."""
    return Batch(codec, sizes)


def _top(codec: Coder) -> int | None:
    if not serves(codec):
        raise CompressError(
            'window="payload" as array code, which encodes blocks of many payloads at once; '
            'expected window="block" or a number. Or encode tensors on the CPU.'
        )
    return fixed_top(codec)
