"""Checks that all ranks agree: on settings and tensors at the start, on parameters later.

Where ranks differ, training fails with a mismatch deep in the transport, or hangs; or, if two
tensors of the same shape swap names, it goes wrong silently. So ranks are compared first.

A single all-reduce of integers does it: the number of participating ranks, pieces of a digest, and
their squares. All digests are equal if and only if count * sum of squares = square of sum
(Cauchy-Schwarz), and every rank gets the same answer. Only if they differ are the texts themselves
exchanged, and every rank raises the same error. A rank that has joined adds zeros, and is not
compared.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import CompressError

Fingerprint = Sequence[tuple[str, str]]  # names and values: ("setting ratio", "100.0")
Words = npt.NDArray[np.int64]

_PIECES = 8  # 16-bit pieces of a digest: their squares, summed over 2**20 ranks, fit int64
_SHOWN = 3  # differences listed in a message
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NOTHING = "nothing"


class Total(Protocol):
    """A blocking all-reduce of the rim, called by all ranks in the same order."""

    def __call__(self, name: str, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sum [n] int64, float32 or float64 over the ranks; bit-identical on all ranks."""


def digest_words(fingerprint: Fingerprint | None) -> Words:
    """Return a rank's contribution to the sum that `all_equal` reads, [17] int64.

    fingerprint : None for a rank that is not compared: it adds zeros, like one that has joined
    """
    if fingerprint is None:
        return np.zeros(1 + 2 * _PIECES, np.int64)
    digest = hashlib.sha256(json.dumps(list(fingerprint)).encode()).digest()
    pieces = np.frombuffer(digest, "<u2", _PIECES).astype(np.int64)
    return np.concatenate([[1], pieces, pieces**2])


def all_equal(total: Words) -> bool:
    """Whether all ranks have the same digest, from the sum of their `digest_words`."""
    count, pieces, squares = int(total[0]), total[1 : 1 + _PIECES], total[1 + _PIECES :]
    return all(
        count * int(square) == int(piece) ** 2
        for piece, square in zip(pieces, squares, strict=True)
    )


def difference(
    fingerprint: Fingerprint | None, *, total: Total, rank: int, ranks: int, name: str
) -> str:
    """Describe how the ranks' fingerprints differ, with the same text on all ranks; blocks.

    All ranks call it, once they know that they differ.
    """
    # Gather texts by summing rows, one per rank: an all-reduce is the only collective available.
    text = b"" if fingerprint is None else json.dumps(list(fingerprint)).encode()
    lengths = np.zeros(ranks, np.int64)
    lengths[rank] = len(text)
    lengths = total(f"{name}.lengths", lengths)
    words = np.zeros((ranks, -(-int(lengths.max()) // 8)), np.int64)
    words[rank].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    rows = total(f"{name}.words", words.reshape(-1)).reshape(ranks, -1)
    by_rank = {
        other: [tuple(pair) for pair in json.loads(row.view(np.uint8)[:length].tobytes())]
        for other, (row, length) in enumerate(zip(rows, lengths, strict=True))
        if length  # 0 for a rank that has joined or is not compared
    }
    return _in_words(by_rank)


def _in_words(by_rank: dict[int, list[tuple[str, str]]]) -> str:
    first, *other_ranks = by_rank
    differences = []
    for other in other_ranks:
        for mine, theirs in zip_longest(by_rank[first], by_rank[other], fillvalue=("", _NOTHING)):
            if mine != theirs:
                what = mine[0] or theirs[0]
                # If keys differ, one rank has an entry here that the other lacks.
                here, elsewhere = (
                    value if key in ("", what) else f"{key} {value}"
                    for key, value in (mine, theirs)
                )
                differences.append(f"{what}: {here} on rank {first}, {elsewhere} on rank {other}")
    more = len(differences) - _SHOWN
    return "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def agree(
    fingerprint: Fingerprint, *, total: Total, rank: int, ranks: int, name: str, do: str
) -> None:
    """Raise CompressError on every rank unless all have the same fingerprint; blocks.

    name : of the collectives
    do : the end of the message: how to make the ranks agree
    """
    if not all_equal(total(name, digest_words(fingerprint))):
        differing = difference(fingerprint, total=total, rank=rank, ranks=ranks, name=name)
        raise CompressError(f"ranks have different settings or tensors: {differing}. {do}")


def fingerprint_of(record: Any, *, but: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return the fingerprint of a settings dataclass, excluding some of its fields."""
    left_out = set(but)
    return [
        (f"setting {field.name}", plain(getattr(record, field.name)))
        for field in fields(record)
        if field.name not in left_out
    ]


def plain(value: Any) -> str:
    """Return the repr without addresses, which differ between processes."""
    return _ADDRESS.sub("", repr(value))


_WIDTH = 2**16  # words weighted at once: they fit the cache
DO = (
    "Resume from an earlier checkpoint, or broadcast the parameters of one rank and reset the "
    "error memories. If it happens again, suspect a rank's memory or its network adapter. "
    "check_every=0 turns this check off"
)


class ParameterCheck:
    """Decides when one optimizer's parameters are compared; builds the error if ranks differ.

    All ranks add the same mean to the same weights, so they stay bit-identical. But a single bit
    flipped in what one rank receives, compressed or plain, makes that rank differ forever, and
    nothing fails. A digest of the parameters, 17 words to sum, detects this at the cost of one pass
    over the weights: every 100 steps, that is well below a thousandth of the training time.

    every : number of steps between comparisons; 0 for none
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.reset()

    def reset(self) -> None:
        """Restart the count, e.g. when the number of ranks has changed; on all ranks at once."""
        self.steps, self.same_at = 0, 0

    def step(self) -> bool:
        """Begin a step; return whether to compare the parameters it starts from."""
        compares = self.every > 0 and self.steps > 0 and self.steps % self.every == 0
        self.steps += 1
        return compares

    @property
    def free_steps(self) -> int:
        """Number of steps, from the next one on, in which nothing is compared."""
        return -self.steps % self.every if self.every else 2**62  # more than any run has

    def passed(self, at: int) -> None:
        """Record that all parameters were equal before step `at`, counted from 0."""
        self.same_at = at

    def error(
        self,
        at: int,
        fingerprint: Fingerprint | None,
        *,
        total: Total,
        rank: int,
        ranks: int,
        hint: str = "",
    ) -> CompressError:
        """Return the error to raise, the same on every rank; blocks, and all ranks call it.

        fingerprint : None on a rank that sends none
        hint : inserted before the advice; equal on all ranks
        """
        differing = difference(fingerprint, total=total, rank=rank, ranks=ranks, name="sn.same")
        since = f"they were the same after step {self.same_at}"
        if not self.same_at:
            since = (
                "they were not compared before: broadcast the parameters of one rank before "
                "training, so that all start with the same"
            )
        error: CompressError = CompressError(
            f"ranks have different parameters after step {at}, {since}; {differing} (digests). "
            f"{hint}{DO}."
        )
        return error


@cache
def weights() -> npt.NDArray[np.int64]:
    """Return an odd factor for each of `_WIDTH` words, [65536] int64."""
    numbers = np.random.default_rng(2026).integers(-(2**62), 2**62, _WIDTH)
    return numbers * 2 + 1


def weigh(
    words: Any, factors: Any, wide: Callable[[Any], Any], fetch: Callable[[list[Any]], list[int]]
) -> str:
    """Return a digest of [n] words of up to 32 bits, on any device: a sum weighted by odd numbers.

    The sum is modulo 2**64, where odd numbers have inverses: a change of a single word is always
    detected, and a change of several is missed with a probability of at most 2**-32, unless it is
    chosen by someone who knows the weights.

    factors : `weights()`, of the same array library and device
    wide : converts words to int64
    fetch : copies the sums of all pieces to the host at once, as each copy waits for the device
    """
    sums = []
    for start in range(0, len(words), _WIDTH):
        part = wide(words[start : start + _WIDTH])
        sums.append((part * factors[: len(part)]).sum())
    total = sum((2 * number + 1) * summed for number, summed in enumerate(fetch(sums)))
    return f"{total % 2**64:016x}"


def digest(values: npt.NDArray[Any]) -> str:
    """Return the digest of the bits of an array on the host."""
    flat = np.ascontiguousarray(values).reshape(-1)
    size = min(flat.dtype.itemsize, 4)
    words = flat.view(np.uint8) if flat.dtype == np.bool_ else flat.view(f"i{size}")
    wide, fetch = (lambda part: part.astype(np.int64)), (lambda sums: list(map(int, sums)))
    return weigh(words, weights(), wide, fetch)


# Seconds between two polls: long enough to yield the core, and a small fraction of the wait so far,
# so that little time passes between arrival and wake-up.
_SHORTEST, _LONGEST, _SHARE = 1e-4, 1e-3, 0.15
WAIT_S = 1800.0  # longer than one rank alone takes to validate or to write a checkpoint


def result_of(hvd: Any, handle: int, *, limit_s: float, what: str) -> Any:
    """Wait for a handle of horovod.torch, sleeping; CompressError after `limit_s` seconds.

    hvd.synchronize busy-polls, only yielding in between. With fewer cores than ranks, that slows
    down the very threads it waits for: a gossip test on four ranks and two cores took 41 to 77 s
    over Gloo's alltoall, and takes 20 to 22 s when sleeping.

    what : description of what is waited for
    """
    start = time.monotonic()
    while not hvd.poll(handle):
        waited_s = time.monotonic() - start
        time.sleep(min(max(_SHARE * waited_s, _SHORTEST), _LONGEST))
        if waited_s > limit_s:
            raise CompressError(waited_message(what, limit_s))
    return hvd.synchronize(handle)


def waited_message(what: str, limit_s: float) -> str:
    """The error message after a wait that timed out."""
    return (
        f"waited {limit_s:g} s for the other ranks, for {what}. They have exited, or never reach "
        "this call: ranks differ in the number of optimizers or steps, or only some take a branch. "
        "Check where they are; if they are only slow, set a larger wait_s."
    )
