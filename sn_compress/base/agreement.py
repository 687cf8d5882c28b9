"""Whether all ranks say the same: their settings and tensors at the start, their weights later.

Ranks that differ end as a mismatch deep in the transport, a wait without end, or, where two tensors
of one shape have changed names, in silence. So each says what it has, as words, before anything
depends on it.

One all-reduce of whole numbers asks: the number of ranks that speak, pieces of a digest, and their
squares. All are equal if and only if count * sum of squares = square of sum, which every rank sees
alike. Only where they differ the words themselves travel, and every rank raises the same error. A
rank that has joined adds zeros, and is not asked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import CompressError

Said = Sequence[tuple[str, str]]  # of what, and what of it: ("setting ratio", "100.0")
Words = npt.NDArray[np.int64]

_PIECES = 8  # of 16 bits: their squares, summed over 2**20 ranks, fit a word
_SHOWN = 3  # differences in a message
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NOTHING = "nothing"


class Total(Protocol):
    """An all-reduce of the rim: it blocks, and all ranks call it in the same order."""

    def __call__(self, name: str, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sum over the ranks of [n] int64, float32 or float64; the same bits on all ranks."""


def question(said: Said | None) -> Words:
    """What a rank adds to the sum that tells whether all say the same, [17] int64.

    None is of a rank that is not asked: as one that has joined, it adds zeros.
    """
    if said is None:
        return np.zeros(1 + 2 * _PIECES, np.int64)
    digest = hashlib.sha256(json.dumps(list(said)).encode()).digest()
    pieces = np.frombuffer(digest, "<u2", _PIECES).astype(np.int64)
    return np.concatenate([[1], pieces, pieces**2])


def alike(total: Words) -> bool:
    """Whether all ranks said the same, from the sum of what they asked."""
    count, pieces, squares = int(total[0]), total[1 : 1 + _PIECES], total[1 + _PIECES :]
    return all(
        count * int(square) == int(piece) ** 2
        for piece, square in zip(pieces, squares, strict=True)
    )


def difference(said: Said | None, *, total: Total, rank: int, ranks: int, name: str) -> str:
    """What ranks say that others do not, in words, the same on all of them; blocks.

    Called by all ranks, when they know that they differ.
    """
    text = b"" if said is None else json.dumps(list(said)).encode()
    lengths = np.zeros(ranks, np.int64)
    lengths[rank] = len(text)
    lengths = total(f"{name}.lengths", lengths)
    words = np.zeros((ranks, -(-int(lengths.max()) // 8)), np.int64)
    words[rank].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    rows = total(f"{name}.words", words.reshape(-1)).reshape(ranks, -1)
    every = {
        other: [tuple(pair) for pair in json.loads(row.view(np.uint8)[:length].tobytes())]
        for other, (row, length) in enumerate(zip(rows, lengths, strict=True))
        if length  # none of a rank that has joined, or is not asked
    }
    return _in_words(every)


def _in_words(every: dict[int, list[tuple[str, str]]]) -> str:
    first, *others = every
    found = []
    for other in others:
        for mine, theirs in zip_longest(every[first], every[other], fillvalue=("", _NOTHING)):
            if mine != theirs:
                what = mine[0] or theirs[0]
                # Of other things: what the one has in this place, the other has not.
                own, its = (
                    value if key in ("", what) else f"{key} {value}"
                    for key, value in (mine, theirs)
                )
                found.append(f"{what}: {own} on rank {first}, {its} on rank {other}")
    more = len(found) - _SHOWN
    return "; ".join(found[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def agree(said: Said, *, total: Total, rank: int, ranks: int, name: str, do: str) -> None:
    """Raise CompressError, on every rank, unless all say the same; blocks.

    name : of the collectives
    do : how to make them say the same, the end of the message
    """
    if not alike(total(name, question(said))):
        told = difference(said, total=total, rank=rank, ranks=ranks, name=name)
        raise CompressError(f"ranks have other settings or other tensors: {told}. {do}")


def said_of(record: Any, *, but: Iterable[str] = ()) -> list[tuple[str, str]]:
    """What a dataclass of settings says, all but some of its fields."""
    left_out = set(but)
    return [
        (f"setting {field.name}", plain(getattr(record, field.name)))
        for field in fields(record)
        if field.name not in left_out
    ]


def plain(value: Any) -> str:
    """Its repr without addresses, which no two processes share."""
    return _ADDRESS.sub("", repr(value))
