"""Launches of csrc/compress/whole.cu: one record over a whole vector, coefficients already there.

The transform before and after is cuFFT's, called where the tensors are (`codecs/frequency`). All
kernels of one vector share a scratch buffer; nothing is allocated and nothing waits for the host,
so the number of launches does not depend on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...base.errors import CompressError
from ...devices._cuda import Program
from ..words.elias_fano import upper_bits
from .launch import DTYPES, Device, Format, Struct

_THREADS, _CHUNK, _STATE_BYTES = 256, 4096, 4 * (8 + 2048)
_WHOLE = np.dtype(
    [
        ("coefs", "<u8"),
        ("memory", "<u8"),
        ("words", "<u8"),
        ("state", "<u8"),
        ("counts", "<u8"),
        ("equals", "<u8"),
        ("positions", "<u8"),
        ("totals", "<u8"),
        ("flags", "<u8"),
        ("first_word", "<i8"),
        ("chunks", "<i8"),
        ("edge", "<i8"),
        ("memory_dtype", "<i4"),
        ("pass", "<i4"),
    ]
)


@dataclass(frozen=True)
class Vector:
    """Addresses of one vector on the device; `totals` and `first_word` as in launch.Piece."""

    coefs: int
    scratch: int
    totals: int
    first_word: int
    memory: int = 0
    memory_dtype: str = "float32"
    flags: int = 0


def scratch_bytes(form: Format) -> int:
    """Size of the scratch buffer for encoding or decoding; a multiple of 8."""
    return _STATE_BYTES + 8 * _most_chunks(form) + 8 * form.kept


def encode_whole(
    device: Device, form: Format, vector: Vector, words: int, *, decay: float, top: int | None
) -> None:
    """Encode coefs + decay * memory into the record at `words`; coefs become the residual."""
    if form.values not in ("range", "fp16"):
        raise CompressError(
            f"values={form.values!r} over a whole vector on a GPU; expected 'range' or 'fp16'. "
            "Choose a block of up to 8192, or encode on the CPU."
        )
    run = _Run(device, form, vector, form.settings(device, factor=decay, top=top))
    chunks = -(-form.bins // _CHUNK)
    floats = form.bins * form.parts
    run("begin", max(form.words, 2048), _THREADS, words)
    run("add_memory", floats, 4 * _THREADS, words)
    for number in range(3):
        run("histogram", form.bins, _CHUNK, words, number=number)
        run("choose", 1, 1, words, number=number)
    run("count_marks", form.bins, _CHUNK, words)
    run("offsets", 1, 1, words, chunks=chunks)
    run("pack", form.bins, _CHUNK, words)
    run("sum_words", form.words, 4 * _THREADS, words)


def decode_whole(
    device: Device, form: Format, vector: Vector, ranks: Sequence[int], *, weight: float
) -> None:
    """Add weight * the values of the records at `ranks`, in order, to coefs."""
    run = _Run(device, form, vector, form.settings(device, factor=weight, ranks=len(ranks)))
    bits = form.bins if form.positions == "bitmap" else upper_bits(form.kept, form.bins)
    for rank, words in enumerate(ranks):
        run("begin_decode", 1, 1, words)
        if form.positions != "all":
            run("count_ones_in", bits, _CHUNK, words)
            run("offsets", 1, 1, words, chunks=-(-bits // _CHUNK), equals=False)
            run("list_positions", bits, _CHUNK, words)
        run("check_order", form.kept, _THREADS, words)
        run("add_values", form.bins, _THREADS, words)
        run("sum_words", form.words, 4 * _THREADS, words, rank=rank)


def _most_chunks(form: Format) -> int:
    bits = max(form.bins, upper_bits(form.kept, form.bins))
    return -(-bits // _CHUNK)


class _Run:
    """Starts the kernels of one vector."""

    def __init__(self, device: Device, form: Format, vector: Vector, settings: Struct) -> None:
        # Counts and histograms are 32 bits wide.
        if form.bins >= 2**32:
            raise CompressError(
                f"one transform over {form.block} elements has {form.bins} bins; expected fewer "
                "than 2**32. Use blocks."
            )
        self.device, self.vector, self.settings = device, vector, settings
        self.form = form
        self.program = Program("whole.cu", (("SN_PARTS", form.parts),))

    def __call__(
        self,
        kernel: str,
        work: int,
        each: int,
        words: int,
        *,
        number: int = 0,
        chunks: int = 0,
        equals: bool = True,
        rank: int = 0,
    ) -> None:
        """Start `kernel` on ceil(work / each) blocks."""
        form, vector, most = self.form, self.vector, _most_chunks(self.form)
        counts = vector.scratch + _STATE_BYTES
        whole = np.zeros(1, _WHOLE)
        whole[0] = (
            vector.coefs,
            vector.memory,
            words,
            vector.scratch,
            counts,
            counts + 4 * most if equals else 0,
            counts + 8 * most,
            vector.totals + 8 * rank,
            vector.flags,
            vector.first_word,
            chunks,
            form.bins * 2 - 1 if form.parts == 2 and form.block % 2 == 0 else -1,
            DTYPES.index(vector.memory_dtype),
            number,
        )
        self.device.launch(
            self.program,
            kernel,
            blocks=-(-work // each),
            threads=_THREADS,
            shared_bytes=0,
            args=[whole, self.settings],
        )
