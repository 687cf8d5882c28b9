"""Low-bit integers that an int32 all-reduce can sum: several signed digits in one word.

Horovod's torch all-reduce takes no type below int32. Four digits d of base 256, or two of base
65536, make one word, sum d_i * base**i. As long as the sum over the ranks of each digit stays
inside half a base, words add up without a carry that matters, and a rank that adds zero words
(one that has joined) adds nothing. With 8 ranks a digit of base 256 has 15 levels on each side.

Digits of one place lie together: word i of w holds digits i, i + w, i + 2 w, i + 3 w. So every
place is one stretch of memory. No sum of words leaves int32, nor does any step on the way there
and back: 127 * (1 + 2**8 + 2**16 + 2**24) + 2**23 + 2**15 + 2**7 is 2**31 - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from ...base.errors import CompressError
from ...devices.arrays import Array, namespace, shifted_right

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
    def of(cls, ranks: int, *, fine: bool = False, most: int = 2**15 - 1) -> Digits:
        """The narrowest digits `ranks` ranks can sum; 16 bits at least with `fine`.

        most : that the magnitude of a sum may not exceed
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise CompressError(
                f"a sum over {ranks} ranks; expected 1 to {MAX_RANKS}. Use FFTCompression, or "
                "no compression."
            )
        for bits in (16,) if fine else (8, 16):
            limit = min(2 ** (bits - 1) - 1, most) // ranks
            if limit >= _COARSEST:
                break
        return cls(bits, limit)

    def words(self, count: int) -> int:
        """Words that hold `count` digits."""
        return -(-count * self.bits // 32)

    def pack(self, digits: Array) -> Array:
        """[words(count)] int32 from [count] int32 digits of at most `limit`."""
        xp = namespace(digits)
        count, per = digits.shape[0], 32 // self.bits
        if not count:
            return digits
        words = self.words(count)
        if words * per > count:
            missing = (words * per - count,)
            padding = xp.zeros(missing, dtype=xp.int32, device=digits.device)
            digits = xp.concat([digits, padding])
        places = [digits[at * words : (at + 1) * words] for at in range(per)]
        return reduce(lambda high, low: high * 2**self.bits + low, reversed(places))

    def unpack(self, words: Array, count: int) -> Array:
        """[count] int32 sums of digits from the summed words."""
        xp = namespace(words)
        half, mask = 2 ** (self.bits - 1), 2**self.bits - 1
        shifts = range(0, 32, self.bits)
        rest = words + sum(half << shift for shift in shifts[:-1])
        places = [(shifted_right(rest, shift) & mask) - half for shift in shifts[:-1]]
        return xp.concat([*places, shifted_right(rest, shifts[-1])])[:count]
