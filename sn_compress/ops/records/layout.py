"""What fixes the bits of a record, see record.py: known before there is a value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ..words.elias_fano import low_bits, upper_bits

Values = Literal["range", "fp16", "sign", "2bit"]

NON_FINITE = 0x7FC0
"""The upper half of a float32 NaN: the head of a block that has NaN or Inf."""


class Tally(NamedTuple):
    """What one call saw: values clipped, squared norm in, squared norm lost (finite blocks)."""

    saturated: int
    energy: float
    error: float


@dataclass(frozen=True)
class Layout:
    """What fixes the bits of a record.

    `parts` is 2 for complex bins, of which a block of b reals has b // 2 + 1, and 1 for the
    block's b real coefficients. `bits` and `mantissa` belong to values="range".
    """

    block: int
    kept: int
    values: Values
    bits: int
    mantissa: int
    positions: Literal["elias-fano", "bitmap"]
    parts: Literal[1, 2] = 2

    @property
    def bins(self) -> int:
        return self.block // 2 + 1 if self.parts == 2 else self.block

    @property
    def code_bits(self) -> int:
        return {"range": self.bits, "fp16": 16, "sign": 1, "2bit": 2}[self.values]

    @property
    def head_bits(self) -> int:
        return 32 if self.values == "2bit" else 16

    @cached_property
    def words(self) -> int:
        """32-bit words per record."""
        return -(-(self.positions_at + self.position_bits) // 32)

    @property
    def positions_at(self) -> int:
        return self.head_bits + self.parts * self.kept * self.code_bits

    @property
    def position_bits(self) -> int:
        k, f = self.kept, self.bins
        if k == f:
            return 0
        if self.positions == "bitmap":
            return f
        return k * low_bits(k, f) + upper_bits(k, f)
