"""Low-bit integers that an int32 all-reduce can sum: several signed digits in one word.

Horovod's torch all-reduce takes no type below int32. Four digits d of base 256, or two of base
65536, make one word, sum d_i * base**i. As long as the sum over the ranks of each digit stays
inside half a base, words add up without a carry that matters, and a rank that adds zero words
(one that has joined) adds nothing. With 8 ranks a digit of base 256 has 31 levels, with 16 it
has 15.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import CompressError

Words = npt.NDArray[np.int32]
Integers = npt.NDArray[np.int32]

MAX_RANKS = 2047
_COARSEST = 3  # fewer levels on each side than this are not worth their byte


@dataclass(frozen=True)
class Digits:
    """How many bits a digit has, and how large one rank's digit may be.

    Attributes
    ----------
    bits : 8 or 16
    limit : largest magnitude of one rank's digit
    """

    bits: int
    limit: int

    @classmethod
    def of(cls, ranks: int, *, fine: bool = False) -> Digits:
        """The narrowest digits `ranks` ranks can sum; 16 bits at least with `fine`."""
        if not 1 <= ranks <= MAX_RANKS:
            raise CompressError(
                f"a shared exchange of {ranks} ranks; expected 1 to {MAX_RANKS}. Use "
                "FFTCompression, or no compression."
            )
        for bits in (16,) if fine else (8, 16):
            limit = (2 ** (bits - 1) - 1) // ranks
            if limit >= _COARSEST:
                break
        return cls(bits, limit)

    def words(self, count: int) -> int:
        """Words that hold `count` digits."""
        return -(-count * self.bits // 32)

    def pack(self, digits: Integers) -> Words:
        """[words(count)] int32 from [count] digits of at most `limit`."""
        per = 32 // self.bits
        padded = np.zeros(self.words(digits.size) * per, np.int64)
        padded[: digits.size] = digits
        places = np.int64(1) << (self.bits * np.arange(per, dtype=np.int64))
        return (padded.reshape(-1, per) @ places).astype(np.int32)

    def unpack(self, words: Words, count: int) -> Integers:
        """[count] sums of digits from the summed words."""
        base = np.int64(1) << self.bits
        rest = words.astype(np.int64)
        digits = np.empty((words.size, 32 // self.bits), np.int32)
        for place in range(digits.shape[1]):
            low = (rest + base // 2) % base - base // 2
            digits[:, place] = low
            rest = (rest - low) >> self.bits
        return digits.reshape(-1)[:count]
