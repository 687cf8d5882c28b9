"""Low-bit integers that an int32 all-reduce can sum: several signed digits in one word.

Horovod's torch all-reduce takes no type below int32. Four digits d of base 256, or two of base
65536, make one word, sum d_i * base**i. As long as the sum over the ranks of each digit stays
inside half a base, words add up without a carry that matters, and a rank that adds zero words
(one that has joined) adds nothing. With 8 ranks a digit of base 256 has 31 levels, with 16 it
has 15.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import Array, device_of, namespace
from ..errors import CompressError

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
                f"a sum over {ranks} ranks; expected 1 to {MAX_RANKS}. Use FFTCompression, or "
                "no compression."
            )
        for bits in (16,) if fine else (8, 16):
            limit = (2 ** (bits - 1) - 1) // ranks
            if limit >= _COARSEST:
                break
        return cls(bits, limit)

    def words(self, count: int) -> int:
        """Words that hold `count` digits."""
        return -(-count * self.bits // 32)

    def pack(self, digits: Array) -> Array:
        """[words(count)] int32 from [count] whole numbers of at most `limit`, of any dtype."""
        xp = namespace(digits)
        per = 32 // self.bits
        whole = xp.astype(digits, xp.int64)
        missing = self.words(whole.shape[0]) * per - whole.shape[0]
        if missing:
            rest = xp.zeros(missing, dtype=xp.int64, device=device_of(whole))
            whole = xp.concat([whole, rest])
        rows = xp.reshape(whole, (-1, per))
        total = rows[:, 0]
        for place in range(1, per):
            total = total + rows[:, place] * 2 ** (self.bits * place)
        # What is beyond 32 bits falls away as a carry would; said here, as libraries need not agree
        # on a cast that does not fit.
        return xp.astype((total + 2**31) % 2**32 - 2**31, xp.int32)

    def unpack(self, words: Array, count: int) -> Array:
        """[count] int32 sums of digits from the summed words, [words(count)] int32."""
        xp = namespace(words)
        half, rest, places = 2 ** (self.bits - 1), xp.astype(words, xp.int64), []
        for _ in range(32 // self.bits):
            low = (rest + half) % (2 * half) - half
            places.append(low)
            rest = (rest - low) // (2 * half)
        flat = xp.reshape(xp.stack(places, axis=1), (-1,))
        return xp.astype(flat[:count], xp.int32)
