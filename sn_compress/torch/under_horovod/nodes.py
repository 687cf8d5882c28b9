"""An optimizer of Horovod's torch by nodes: which there are, and what it goes on from.

A node is what ranks with one host name are on, as horovodrun was told it. Horovod's process sets
would make groups of ranks; they are not used (docs/decisions/0100).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...engine import engine_state
from ...engine.hierarchy import Place, horovods_layout, may_have_nodes
from .agreement import total
from .memory import OptimizerState, memory_of


def find_nodes(memory: OptimizerState, optimizers: Sequence[Any], process_set: Any) -> None:
    """See for optimizers which nodes there are; blocks, on all ranks."""
    every = [(each, memory_of(each)) for each in optimizers]
    if not any(may_have_nodes(own.settings, process_set) for _, own in every):
        return
    layout = horovods_layout(partial(total, memory, process_set), process_set)
    for optimizer, own in every:
        if layout is None or not may_have_nodes(own.settings, process_set):
            own.nodes = None
        elif own.nodes is None or own.nodes.layout != layout:
            own.nodes = Place(layout, process_set.rank())
            own.nodes.own(_tensors(optimizer))


def _tensors(optimizer: Any) -> list[tuple[str, int]]:
    """Those of an optimizer, in the order in which gradients come; the same on all ranks."""
    asked, names = optimizer._requires_update, optimizer._parameter_names
    every = [p for group in optimizer.param_groups for p in group["params"] if p in asked]
    return [(names[p], p.numel()) for p in reversed(every)]


def take_loaded(memory: OptimizerState, optimizer: Any, process_set: Any) -> None:
    """Go on from what was loaded before the nodes were known; CompressError if it cannot be."""
    states, memory.loaded = memory.loaded, []
    engine_state.take_loaded(
        memory.engine, states, memory.nodes, _tensors(optimizer), ranks=process_set.size(),
        rank=process_set.rank(),
    )  # fmt: skip
