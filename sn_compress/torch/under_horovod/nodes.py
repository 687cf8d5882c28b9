"""An optimizer of Horovod's torch by nodes: which there are, and what it goes on from.

A node is what ranks with one host name are on, as horovodrun was told it. Horovod's process sets
would make groups of ranks; they are not used (docs/decisions/0100).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...engine import engine_state
from ...engine.hierarchy import Place, find_layout, states_to_load
from .agreement import total
from .memory import OptimizerState, memory_of

_log = logging.getLogger(__name__)


def find_nodes(memory: OptimizerState, optimizers: Sequence[Any], process_set: Any) -> None:
    """See for optimizers which nodes there are; blocks, on all ranks."""
    every = [(each, memory_of(each)) for each in optimizers]
    if not any(_may(own, process_set) for _, own in every):
        return
    rank, ranks = process_set.rank(), process_set.size()
    # As the launcher calls it, so that an address and a name of one machine are two.
    node = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    layout = find_layout(partial(total, memory, process_set), node, rank=rank, ranks=ranks)
    if isinstance(layout, str) and rank == 0:
        level = logging.WARNING if layout.startswith("nodes have") else logging.DEBUG
        _log.log(level, "%s: all ranks exchange with all others", layout)
    for optimizer, own in every:
        if isinstance(layout, str) or not _may(own, process_set):
            own.nodes = None
        elif own.nodes is None or own.nodes.layout != layout:
            own.nodes = Place(layout, rank)
            own.nodes.own(_tensors(optimizer))


def _may(memory: OptimizerState, process_set: Any) -> bool:
    """Whether it goes by nodes where there are some; alike on all ranks."""
    settings = memory.settings
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"  # nodes would come and go
    # A tuner compares with Horovod's all-reduce of all; fewer than four are no two nodes of two.
    return settings.hierarchy == "auto" and not (
        settings.tune or elastic or process_set.process_set_id or process_set.size() < 4
    )


def _tensors(optimizer: Any) -> list[tuple[str, int]]:
    """Those of an optimizer, in the order in which gradients come; the same on all ranks."""
    asked, names = optimizer._requires_update, optimizer._parameter_names
    every = [p for group in optimizer.param_groups for p in group["params"] if p in asked]
    return [(names[p], p.numel()) for p in reversed(every)]


def take_loaded(memory: OptimizerState, optimizer: Any, process_set: Any) -> None:
    """Go on from what was loaded before the nodes were known; CompressError if it cannot be."""
    states, memory.loaded = memory.loaded, []
    if states is None and memory.nodes is not None:  # all ranks have the same of all tensors
        states = [engine_state.state_dict(memory.engine, ranks=1, rank=0)]
    found = states_to_load(states, memory.nodes, _tensors(optimizer)) if states else None
    if found is not None:
        engine_state.load_state_dict(
            memory.engine, found, ranks=process_set.size(), rank=process_set.rank(), mean=True
        )
