"""Launches of csrc/compress/seal.cu: headers and checksums of payloads on a GPU, many at a time.

Before encoding a header and padding are written; after it, the checksum. Before decoding, sums are
set to zero; after it they and the headers are compared, and flags raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...devices._cuda import Program
from ..words import checksum
from .launch import ROWS, Device, powers

SHEET = np.dtype(
    [
        ("buffer", "<u8"),
        ("totals", "<u8"),
        ("flags", "<u8"),
        ("rank_words", "<i8"),
        ("words", "<i8"),
        ("used", "<i8"),
        ("header", "<u4", 6),
        ("end", "<u4"),
        ("unused", "<u4"),
    ]
)
SHEETS = np.dtype([("at", SHEET, ROWS)])


@dataclass(frozen=True)
class Sheet:
    """One payload, or one of each rank `rank_words` apart; `header` is its first 24 bytes."""

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
    """Write headers and padding, and set the counters to zero; before encoding."""
    _sheets(device, sheets, "open_payloads")


def seal_payloads(device: Device, sheets: Sequence[Sheet]) -> None:
    """Write the number of saturated values and the checksum; after encoding."""
    _sheets(device, sheets, "seal_payloads", _powers(device))


def open_checks(device: Device, sheets: Sequence[Sheet], ranks: int) -> None:
    """Set the checksums of received payloads to zero; before decoding."""
    _sheets(device, sheets, "open_checks", np.full(1, ranks, np.int32))


def check_payloads(device: Device, sheets: Sequence[Sheet], ranks: int) -> None:
    """Raise flags for headers that are not as expected and wrong checksums; after decoding."""
    _sheets(device, sheets, "check_payloads", np.full(1, ranks, np.int32), _powers(device))


def _powers(device: Device) -> Any:
    return np.full(1, powers(device), np.uint64)


def _sheets(device: Device, sheets: Sequence[Sheet], kernel: str, *args: Any) -> None:
    for first in range(0, len(sheets), ROWS):
        rows = sheets[first : first + ROWS]
        table = np.zeros(1, SHEETS)
        for i, sheet in enumerate(rows):
            table["at"][0, i] = (
                sheet.buffer,
                sheet.totals,
                sheet.flags,
                sheet.rank_words,
                sheet.words,
                sheet.used,
                np.frombuffer(sheet.header, "<u4"),
                checksum.step_on(sheet.words),
                0,
            )
        device.launch(
            SEAL, kernel, blocks=len(rows), threads=THREADS, shared_bytes=0, args=[table, *args]
        )
