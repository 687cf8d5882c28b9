"""Where each storage comes from, and until when it can be made again.

A storage is rebuilt by running its producer and then the ops that changed it in place. That works
only while everything they read is there in the version they read, or can itself be rebuilt. The
answer is conservative where an earlier version of a changed storage would be needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...graph.graph import Graph


@dataclass(frozen=True)
class Origins:
    """Per storage, by number; the number of ops stands for "not within the graph".

    Attributes
    ----------
    makers
        The ops that rebuild it, in order: its producer, then those that changed it in place.
    last_use
        Its last use by any op, releases included; its producer where nobody reads it.
    last_forward, first_backward
        Its last use by a forward op, its producer included; its first use by any other.
    expiry
        It can be rebuilt just before op t for every t <= expiry; -1 is never.
    droppable
        Whether it may be dropped whenever it is complete and rebuilt for every later use.
    forward
        Whether forward ops make and complete it.
    """

    makers: list[tuple[int, ...]]
    last_use: list[int]
    last_forward: list[int]
    first_backward: list[int]
    expiry: list[int]
    droppable: list[bool]
    forward: list[bool]


def origins(graph: Graph) -> Origins:
    """Find them all, in time linear in the size of the graph (sorting aside)."""
    arrays, count, end = graph.arrays, len(graph.storages), len(graph.ops)
    producer: list[int] = arrays.producer.tolist()
    forward_op = [op.phase == "forward" for op in graph.ops]
    writers: list[list[int]] = [[] for _ in range(count)]
    for op, written in enumerate(arrays.writes):
        for storage in written:
            writers[storage].append(op)
    last_use, last_forward, first_backward = producer.copy(), producer.copy(), [end] * count
    settled = [True] * count
    for op, reads in enumerate(arrays.reads):
        for storage, version in zip(reads, arrays.version[op], strict=True):
            # Somebody else saw an earlier version: rebuilding the last one would not serve them.
            if version < len(writers[storage]) and storage not in arrays.writes[op]:
                settled[storage] = False
        for storage in (*reads, *arrays.releases[op]):
            last_use[storage] = op
            if forward_op[op]:
                last_forward[storage] = op
            else:
                first_backward[storage] = min(first_backward[storage], op)
    makers = [
        () if arrays.resident[storage] else (producer[storage], *writers[storage])
        for storage in range(count)
    ]
    expiry, droppable = [-1] * count, [False] * count
    # Whatever the makers of a storage read is settled, and so complete, before the last of them.
    for storage in sorted(range(count), key=lambda s: makers[s][-1] if makers[s] else -1):
        if not makers[storage] or not settled[storage]:
            continue
        until = end
        for op in makers[storage]:
            alone = all(written == storage for written in arrays.writes[op])
            if not (alone and graph.ops[op].repeatable):
                until = -1
                break
            for source, version in zip(arrays.reads[op], arrays.version[op], strict=True):
                if source == storage:
                    continue
                if version < len(writers[source]):
                    until = min(until, writers[source][version])
                if droppable[source]:
                    until = min(until, expiry[source])
        expiry[storage] = until
        droppable[storage] = until >= last_use[storage] and not bool(arrays.keep[storage])
    # What a backward op still changes is not ours to move between the two passes.
    forward = [
        bool(made) and forward_op[made[0]] and made[-1] <= last_forward[storage]
        for storage, made in enumerate(makers)
    ]
    return Origins(makers, last_use, last_forward, first_backward, expiry, droppable, forward)
