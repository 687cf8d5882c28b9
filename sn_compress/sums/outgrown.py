"""Whether a tensor's gradient has outgrown its size: what a rank sees of it, and the ranks' votes.

A size is chosen from the gradient of one step, which may lie in few directions by chance, or
because its loss has hardly begun. Then what is not sent piles up: the memory holds several
gradients where it was to hold one, and training follows late.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from ..base.errors import CompressError, PayloadError
from ..devices.arrays import Array, namespace
from ..ops.words.word_sum import PRIME, word_sum
from .choose import Size, Words, words_of

# Steps behind a choice: the first look at what the memories hold, and the first vote. Both come
# again at twice the time, and so on, so that a size is doubted at most as late as it has served. A
# vote costs few words, and none where no size is small; in TensorFlow, whose graphs do not vote, it
# costs tracing the step again.
LOOK, VOTE = 25, 50
# Norm of a memory over that of a gradient. Where k directions travel of K that carry a gradient,
# each waits for about K / k steps, and the memory holds half as many gradients. A choice that
# catches most of the energy leaves 0.3 to 3; small nets whose sizes came from an unlucky step had 5
# to 9, and learned ten times worse.
MOST_HELD = 4.0
# That over the same of the tensors that got their part of the words. Where noise has as many
# directions as a matrix, or the ratio is high, all of them hold several gradients, and to choose
# anew would only take from others: small LSTMs, transformers and convolutions had up to 2.6 in
# ordinary training, nets as above 4 and more.
MOST_OVER_OTHERS = 3.0
# Words over an even part. Above it there is little to gain; and alone a tensor gets at least half
# of its part, the largest size that fits, so that none is chosen anew twice.
SMALL = 0.5


def looks(since: int) -> bool:
    """Whether the step that is `since` behind the choice is one of a look."""
    return since >= LOOK and since == _next(LOOK, since - 1)


def next_vote(since: int) -> int:
    """The first step of a vote later than `since` steps behind the choice; all are of a look."""
    return _next(VOTE, since)


def _next(first: int, since: int) -> int:
    return first << (since // first).bit_length()


def is_small(size: Size, even: float, ranks: int) -> bool:
    """Whether a size is less than half of `even` words; that of all of a tensor never is."""
    return size.size > 0 and (sum(words_of(size.shape, size.size, ranks, size.way)) < SMALL * even)


def norm_of(vector: Array) -> float:
    """The norm of [n] numbers; not finite where a step was lost."""
    xp = namespace(vector)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(float(xp.sum(vector * vector)))


def is_outgrown(held: float, others: Iterable[float]) -> bool:
    """What a rank votes of a small tensor that holds so many gradients, and others so many."""
    known = list(others)
    return bool(known) and held > max(MOST_HELD, MOST_OVER_OTHERS * statistics.median(known))


def votes(outgrown: Sequence[bool]) -> Words:
    """What a rank adds to the sum of votes, [2 + tensors] int32; one that has joined adds zeros."""
    words = np.array([1, 0, *outgrown], np.int32)
    words[1] = int(word_sum(words))
    return words


def majority(total: Words, tensors: int) -> list[bool]:
    """For each tensor whether more than half of the ranks that spoke find it outgrown.

    Raises PayloadError where the sum is damaged, on every rank.
    """
    if total.shape != (2 + tensors,):
        raise CompressError(
            f"got {total.size} words of votes; expected {2 + tensors}. Do all ranks have the same "
            "tensors?"
        )
    sound = (int(word_sum(total)) - int(total[1])) % PRIME == 0
    if not sound or not ((total[2:] >= 0) & (total[2:] <= total[0])).all():
        raise PayloadError(
            "the summed votes on sizes do not have the sum of their checksums: they were damaged "
            "on the way. If it happens again, suspect memory or the network."
        )
    return [bool(2 * count > total[0]) for count in total[2:].tolist()]
