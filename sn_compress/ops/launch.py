"""The arguments of kernel launches: sizes, tables, constants. Plain NumPy, so it runs anywhere.

A launch takes its table of tensors by value, among the kernel's arguments. The obvious table in
device memory would have to be uploaded whenever a gradient's address changes, which is a copy from
the host each step and not allowed inside a CUDA graph. 48 rows fit; more rows need more launches.

`Device` runs the launches: CuPy in `_cuda.py`, a g++ build of the same sources in `tests/cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._cuda import Program
from ..errors import CompressError
from . import checksum, spectrum
from .bits import low_bits
from .quantize import Layout

TRANSFORMS = ("fft", "dct", "hadamard", "identity", "spectrum")
VALUES = ("range", "fp16", "sign", "2bit")
POSITIONS = ("elias-fano", "bitmap", "all")
DTYPES = ("float32", "float16", "bfloat16")

SMALLEST, LARGEST = 32, 8192  # elements of a block that one thread block holds in shared memory
ROWS = 48  # kSections in section.cuh: as many as fit the 4 KiB of a kernel's arguments
_MOST_BLOCKS = 2**31 - 1  # in a grid

# The layouts of the structs in section.cuh and coder.cuh.
SECTION = np.dtype([
    ("values", "<u8"), ("memory", "<u8"), ("words", "<u8"), ("totals", "<u8"),
    ("rank_words", "<i8"), ("elements", "<i8"), ("first_block", "<i8"), ("first_word", "<i8"),
    ("dtype", "<i4"), ("unused", "<i4"),
])  # fmt: skip
SECTIONS = np.dtype([("at", SECTION, ROWS), ("count", "<i8")])
SETTINGS = np.dtype([
    ("kept", "<i8"), ("bins", "<i8"), ("words", "<i8"), ("values", "<i4"), ("code_bits", "<i4"),
    ("mantissa", "<i4"), ("positions", "<i4"), ("low", "<i4"), ("top", "<i4"),
    ("factor", "<f4"), ("ranks", "<i4"), ("powers", "<u8"),
])  # fmt: skip

Struct = npt.NDArray[np.void]


class Device(Protocol):
    """Runs kernels in order, on one stream."""

    def launch(
        self,
        program: Program,
        kernel: str,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
        args: Sequence[Any],
    ) -> None:
        """Launch `kernel`. Each argument is a NumPy array of one element, passed by value."""

    def constant(self, key: tuple[Any, ...], values: npt.NDArray[Any]) -> int:
        """Return the address of a copy of `values`, made in the first call with this key."""


@dataclass(frozen=True)
class Format:
    """The layout of records, and the transform that computes their coefficients.

    span : elements of each FFT; for other transforms, the block
    """

    layout: Layout
    transform: str
    span: int

    @classmethod
    def of(cls, layout: Layout, transform: str, span: int | None = None) -> Format:
        """Return the format of a layout with coefficients from `transform`, of spans or blocks."""
        return cls(layout, transform, spectrum.span_length(span, layout.block))

    @property
    def fits_block(self) -> bool:
        """Whether one thread block can hold a block, as the fused kernels require."""
        block = self.layout.block
        return SMALLEST <= block <= LARGEST and not block & (block - 1)

    @property
    def threads(self) -> int:
        """Threads per block: one for eight complex points, in whole warps."""
        return max(32, self.layout.block // 16)

    @property
    def program(self) -> Program:
        # Sixteen blocks or 1024 threads per multiprocessor leave 64 registers per thread, which is
        # enough for both kernels.
        resident = min(16, 1024 // self.threads)
        return Program(
            "fused.cu",
            (
                ("SN_BLOCK", self.layout.block),
                ("SN_SPAN", self.span),
                ("SN_THREADS", self.threads),
                ("SN_TRANSFORM", TRANSFORMS.index(self.transform)),
                ("SN_RESIDENT", resident),
            ),
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the record and the list of 16-bit positions."""
        return 4 * (self.layout.words + -(-self.layout.kept // 2))

    def settings(
        self, device: Device, *, factor: float, top: int | None = None, ranks: int = 1
    ) -> Struct:
        """Return the settings as the kernels take them."""
        layout, settings = self.layout, np.zeros(1, SETTINGS)
        kept, bins = layout.kept, layout.bins
        settings["kept"], settings["bins"], settings["words"] = kept, bins, layout.words
        settings["values"] = VALUES.index(layout.values)
        settings["code_bits"] = layout.code_bits
        settings["mantissa"] = layout.mantissa if layout.values == "range" else 0
        # A record that keeps all bins has no list of positions, and neither does shared memory.
        settings["positions"] = POSITIONS.index("all" if kept == bins else layout.positions)
        settings["low"] = low_bits(kept, bins)
        settings["top"] = -1 if top is None else top  # negative: each block has its own
        settings["factor"], settings["ranks"] = factor, ranks
        settings["powers"] = powers(device)
        return settings


@dataclass(frozen=True)
class Piece:
    """A run of equal blocks of one tensor: addresses and sizes.

    `memory` is the error memory, or 0, when encoding, and the error flags when decoding; `totals`
    the counters of the payload, or of each rank's; `first_word` the offset of the first record in
    the payload, `rank_words` the distance between the ranks' payloads, both in 32-bit words.
    """

    values: int
    dtype: str
    elements: int
    blocks: int
    words: int
    first_word: int
    totals: int
    memory: int = 0
    rank_words: int = 0


def powers(device: Device) -> int:
    """Return the address of the table used to compute checksums."""
    return device.constant(("checksum",), checksum.powers())


def encode_blocks(
    device: Device, form: Format, pieces: Sequence[Piece], *, decay: float, top: int | None = None
) -> None:
    """Encode every block of every piece, one launch for up to 48 pieces."""
    _launch(device, form, pieces, "encode_blocks", form.settings(device, factor=decay, top=top))


def decode_blocks(
    device: Device, form: Format, pieces: Sequence[Piece], *, ranks: int, weight: float
) -> None:
    """Write every block of every piece: weight times the sum over the ranks.

    A block with an invalid record becomes NaN, and its flag is set.
    """
    _launch(
        device, form, pieces, "decode_blocks", form.settings(device, factor=weight, ranks=ranks)
    )


def _launch(
    device: Device, form: Format, pieces: Sequence[Piece], kernel: str, settings: Struct
) -> None:
    if not form.fits_block:
        raise CompressError(
            f"block={form.layout.block} on a GPU; expected a power of two from {SMALLEST} to "
            f"{LARGEST}, what fits a multiprocessor's shared memory. Choose another block, or None "
            "for one transform over the whole vector."
        )
    table = twiddles(form.span, form.transform)
    constant = device.constant(("twiddles", form.span, form.transform), table)
    for rows in _rows(pieces):
        sections = np.zeros(1, SECTIONS)
        at = 0  # blocks so far, by which a thread block finds its row
        for i, piece in enumerate(rows):
            sections["at"][0, i] = (
                piece.values, piece.memory, piece.words, piece.totals, piece.rank_words,
                piece.elements, at, piece.first_word, DTYPES.index(piece.dtype), 0,
            )  # fmt: skip
            at += piece.blocks
        sections["count"] = len(rows)
        device.launch(
            form.program,
            kernel,
            blocks=at,
            threads=form.threads,
            shared_bytes=form.shared_bytes,
            args=[sections, settings, np.full(1, constant, np.uint64)],
        )


def _rows(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Split the pieces into runs that fit one launch, skipping empty ones."""
    rows: list[Piece] = []
    for piece in pieces:
        if piece.blocks > _MOST_BLOCKS:
            raise CompressError(
                f"{piece.blocks} blocks in one tensor; a launch takes {_MOST_BLOCKS}. Use a "
                "larger block."
            )
        full = sum(row.blocks for row in rows) + piece.blocks > _MOST_BLOCKS
        if rows and (len(rows) == ROWS or full):
            yield rows
            rows = []
        if piece.blocks:
            rows.append(piece)
    if rows:
        yield rows


@cache
def twiddles(span: int, transform: str) -> npt.NDArray[np.float32]:
    """Return roots of unity in the order in which transform.cuh reads them, [m, 2] float32.

    For each pass after the first, with stride s and radix r: exp(-2 pi i q j / (r s)), q = 1..r-1
    and j = 0..s-1; then exp(-2 pi i k / span) up to a quarter turn; for the DCT also
    exp(-i pi k / (2 span)). Rounded once, from double precision.
    """
    turns = [np.zeros(0)]
    points, stride = span // 2, 8
    if transform in ("fft", "dct"):
        while stride < points:
            radix = min(8, points // stride)
            products = np.outer(np.arange(1, radix), np.arange(stride))
            turns.append(products.reshape(-1) / (radix * stride))
            stride *= radix
        turns.append(np.arange(points // 2 + 1) / span)
    if transform == "dct":
        turns.append(np.arange(points + 1) / (4 * span))
    # NumPy's cosines suffice, whatever their last bit: transforms on a GPU must match those of a
    # host within a bound, not bit by bit (docs/cuda.md). Hosts use spectrum.roots.
    angles = -2 * np.pi * np.concatenate(turns)
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    table.setflags(write=False)
    return table


SHEET = np.dtype([
    ("buffer", "<u8"), ("totals", "<u8"), ("flags", "<u8"),
    ("rank_words", "<i8"), ("words", "<i8"), ("used", "<i8"),
    ("header", "<u4", 6), ("end", "<u4"), ("unused", "<u4"),
])  # fmt: skip
SHEETS = np.dtype([("at", SHEET, ROWS)])


@dataclass(frozen=True)
class Sheet:
    """One payload, or one per rank, `rank_words` apart; `header` is its first 24 bytes."""

    buffer: int
    totals: int
    words: int
    used: int
    header: bytes
    flags: int = 0
    rank_words: int = 0


SEAL = Program("seal.cu")
THREADS = 128  # kThreads in seal.cu


def open_payloads(device: Device, sheets: Sequence[Sheet]) -> None:
    """Write headers and padding, and reset the counters; called before encoding."""
    _sheets(device, sheets, "open_payloads")


def seal_payloads(device: Device, sheets: Sequence[Sheet]) -> None:
    """Write the number of saturated values and the checksum; called after encoding."""
    _sheets(device, sheets, "seal_payloads")


def open_checks(device: Device, sheets: Sequence[Sheet], ranks: int) -> None:
    """Set the checksums of received payloads to zero; called before decoding."""
    _sheets(device, sheets, "open_checks", ranks)


def check_payloads(device: Device, sheets: Sequence[Sheet], ranks: int) -> None:
    """Set flags for unexpected headers and wrong checksums; called after decoding."""
    _sheets(device, sheets, "check_payloads", ranks)


def _sheets(device: Device, sheets: Sequence[Sheet], kernel: str, ranks: int = 1) -> None:
    both = [np.full(1, ranks, np.int32), np.full(1, powers(device), np.uint64)]
    for first in range(0, len(sheets), ROWS):
        rows = sheets[first : first + ROWS]
        table = np.zeros(1, SHEETS)
        for i, sheet in enumerate(rows):
            table["at"][0, i] = (
                sheet.buffer, sheet.totals, sheet.flags, sheet.rank_words, sheet.words, sheet.used,
                np.frombuffer(sheet.header, "<u4"), checksum.step_on(sheet.words), 0,
            )  # fmt: skip
        device.launch(
            SEAL, kernel, blocks=len(rows), threads=THREADS, shared_bytes=0, args=[table, *both]
        )
