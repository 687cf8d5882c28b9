"""A graph in which chosen storages wait for the backward pass in their compressed form.

Whoever may be compressed is said by the graph's owner (`Storage.compressed`); that it happens is
written as ordinary ops, so that lifetimes, peaks, rebuilds and transfers of the compressed form and
of what is restored from it are nothing new to anyone. For a storage `h` there is

    compress h      after its last use outside of the backward pass: reads h, makes `h (compressed)`
    decompress h    before its first use there: reads that and makes `h (restored)`

and all ops of the backward pass read `h (restored)`; or, where they can, `h (compressed)` itself,
and nothing is decompressed (`Compressed.decompress_s` is None). Ops of the forward pass that run
again there read `h` itself, made again exactly: what is lossy reaches those only who were asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from ..base.errors import GraphError
from .graph import Graph
from .records import Op, Storage

COMPRESS: Final = "compress "
DECOMPRESS: Final = "decompress "
SMALL: Final = " (compressed)"
RESTORED: Final = " (restored)"


class Wait(NamedTuple):
    """The op after which a storage is compressed, the next to read it, and what it is then.

    small : the op from which on it is large again; past its last reader where none restores it
    """

    after: int
    before: int
    small: int


def waits(graph: Graph) -> dict[str, Wait]:
    """Return the storages that can be compressed, by name, and when.

    They have a compressed form, are made outside of the backward pass, are read in it by ops that
    do not change them, and nobody keeps, holds or releases them.
    """
    found: dict[str, Wait] = {}
    arrays = graph.arrays
    early, late = _uses(graph)
    changed = {storage for at, op in enumerate(graph.ops) if op.phase == "backward"
               for storage in (*arrays.writes[at], *arrays.outputs[at])}  # fmt: skip
    changed |= {storage for released in arrays.releases for storage in released}
    for number, storage in enumerate(graph.storages):
        ours = not (storage.resident or storage.keep or storage.held)
        free = ours and number not in changed
        if storage.compressed is None or not free or number not in early or number not in late:
            continue
        if early[number][-1] < late[number][0]:
            restored = storage.compressed.decompress_s is not None
            until = late[number][0] if restored else late[number][-1] + 1
            found[storage.name] = Wait(early[number][-1], late[number][0], until)
    return found


def _uses(graph: Graph) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Per storage the ops that name it, outside of the backward pass and in it."""
    early: dict[int, list[int]] = {}
    late: dict[int, list[int]] = {}
    for at, op in enumerate(graph.ops):
        uses = late if op.phase == "backward" else early
        for storage in dict.fromkeys((*graph.arrays.reads[at], *graph.arrays.outputs[at])):
            uses.setdefault(storage, []).append(at)
    return early, late


def with_compressed(graph: Graph, names: Iterable[str]) -> Graph:
    """Return the graph with these storages compressed; see the module.

    Raises GraphError for a storage that cannot be.
    """
    chosen = set(names)
    if not chosen:
        return graph
    able = waits(graph)
    if strangers := sorted(chosen - able.keys()):
        raise GraphError(
            f"storage {strangers[0]!r} cannot be compressed: it states no compressed form, is not "
            "read in the backward pass, or is changed, kept or released there."
        )
    storages: list[Storage] = []
    after: dict[int, list[Op]] = {}
    before: dict[int, list[Op]] = {}
    instead: dict[str, str] = {}
    for storage in graph.storages:
        storages.append(storage)
        if storage.name not in chosen or storage.compressed is None:
            continue
        name, small = storage.name, storage.compressed
        pair = name + SMALL, name + RESTORED
        storages.append(Storage(pair[0], small.bytes))
        # Rounded at random: to compress again would give other values.
        compress = Op(COMPRESS + name, (name,), pair[:1], kind="compress", seconds=small.compress_s,
                  once=True)  # fmt: skip
        after.setdefault(able[name].after, []).append(compress)
        if small.decompress_s is None:
            instead[name] = pair[0]
            continue
        instead[name] = pair[1]
        storages.append(Storage(pair[1], storage.bytes))
        decompress = Op(DECOMPRESS + name, pair[:1], pair[1:], kind="decompress", phase="backward",
                    seconds=small.decompress_s)  # fmt: skip
        before.setdefault(able[name].before, []).append(decompress)
    instead |= {
        alias: instead[target] for alias, target in graph.aliases.items() if target in instead
    }
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        ops += before.get(at, [])
        if op.phase == "backward":
            op = replace(op, inputs=tuple(instead.get(name, name) for name in op.inputs))
        ops += [op, *after.get(at, [])]
    return replace(graph, storages=tuple(storages), ops=tuple(ops))


def as_run(graph: Graph, targets: Iterable[str]) -> Graph:
    """Return the graph whose ops have these names: this one, or one with storages compressed.

    `compress h` among them puts in the ops that compress `h` and restore it.
    """
    new = {name for name in targets if name.startswith(COMPRESS)} - graph.op_index.keys()
    return with_compressed(graph, {name.removeprefix(COMPRESS) for name in new}) if new else graph
