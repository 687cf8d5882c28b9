"""Payloads among many ranks as nodes of a graph: what `engine/scattered.py` says, in nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...engine.scattered import Piece, Shares, rows_of
from .payload_nodes import PayloadNodes, arrived, when_all_are_present
from .sized import Collectives

Memories = list[list[Any]]


def step(
    parts: PayloadNodes,
    nodes: PayloadNodes,
    shares: Shares,
    vectors: Sequence[Any],
    memories: Memories | None,
    number: int,
    present: Any,
    by: Collectives,
) -> tuple[list[Any], Memories, Any]:
    """The means of a bucket's gradients, [n] float32 each, its next memories, and what was lost.

    parts, nodes : of what goes to owners, and of what these make of it
    present : see when_all_are_present
    Others are those of `PayloadNodes.encode` and `SizedBucket.step`.
    """
    ranks, rank = by.ranks, by.rank
    mine, others = shares.pieces[rank], shares.others(rank)

    def rows(pieces: Sequence[Piece], factor: float = 1.0) -> Memories | None:
        if memories is None:
            return None
        found = (
            rows_of(it, nodes.codec, int(vectors[it.tensor].shape[0]), memories[it.tensor])
            for it in pieces
        )
        return [[part * factor for part in own] if factor != 1 else own for own in found]

    words, left, told = parts.encode([_values(it, vectors) for it in others], rows(others))
    words = when_all_are_present(words, present, ranks)
    splits = [size // 4 for size in shares.parts_bytes]
    came = by.alltoall(words, [0 if it == rank else n for it, n in enumerate(splits)], number)
    came = arrived(came, [0 if it == rank else splits[rank] for it in range(ranks)])
    with tf.control_dependencies([came]):
        wire = tf.zeros([0], tf.int32)
    if mine:
        made = parts.decode(
            tf.reshape(came, [ranks - 1, splits[rank]]), [it.elements for it in mine]
        )
        made = [
            mean * ((ranks - 1) / ranks) + _values(it, vectors) * (1 / ranks)
            for mean, it in zip(made, mine, strict=True)
        ]
        wire, kept, lost = nodes.encode(made, rows(mine, 1 / ranks))
        left, told = left + [[part * ranks for part in own] for own in kept], told + lost
    joined = arrived(by.gather(wire, number), [size // 4 for size in shares.means_bytes])
    pieces = [piece for own in shares.pieces for piece in own]
    found = nodes.decode(joined[None], [it.elements for it in pieces])
    means = [
        tf.concat([it for piece, it in zip(pieces, found, strict=True) if piece.tensor == at], 0)
        for at in range(len(vectors))
    ]
    return means, _together([*others, *mine], left, nodes, vectors) if left else [], told


def _values(piece: Piece, vectors: Sequence[Any]) -> Any:
    return vectors[piece.tensor][piece.start : piece.stop]


def _together(
    pieces: Sequence[Piece], left: Memories, nodes: PayloadNodes, vectors: Sequence[Any]
) -> Memories:
    """The memories of whole tensors from those of their pieces."""
    found: Memories = []
    for at, vector in enumerate(vectors):
        n = int(vector.shape[0])
        own = sorted(
            (each for each in zip(pieces, left, strict=True) if each[0].tensor == at),
            key=lambda each: each[0].start,
        )
        parts: Memories = [[] for _ in nodes.codec.sections(n)]
        for piece, rows in own:
            held = [number for number, it in enumerate(nodes.codec.sections(n))
                    if max(piece.start, it.start) < min(piece.stop, it.stop)]  # fmt: skip
            for number, part in zip(held, rows, strict=True):
                parts[number].append(part)
        found.append([tf.concat(rows, 0) for rows in parts])
    return found
