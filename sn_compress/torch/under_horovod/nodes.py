"""An optimizer of Horovod's torch by nodes: which there are, and states loaded until then.

Horovod's process sets would be groups of ranks; they are not used (docs/decisions/0098).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...engine import engine_state
from ...engine.hierarchy import Place, horovods_layout, may_have_nodes
from .agreement import reduced_parameters, total
from .memory import OptimizerState, memory_of


def find_nodes(memory: OptimizerState, optimizers: Sequence[Any], process_set: Any) -> None:
    """Find the nodes for optimizers; blocks, and all ranks call it."""
    states = [memory_of(optimizer) for optimizer in optimizers]
    if not any(may_have_nodes(state.settings, process_set) for state in states):
        return
    layout = horovods_layout(partial(total, memory, process_set), process_set)
    for optimizer, state in zip(optimizers, states, strict=True):
        if layout is None or not may_have_nodes(state.settings, process_set):
            state.nodes = None
        elif state.nodes is None or state.nodes.layout != layout:
            # Else owners stay as they are: they have the residuals.
            state.nodes = Place(layout, process_set.rank())
            state.nodes.owned_names(_tensors(optimizer))


def _tensors(optimizer: Any) -> list[tuple[str, int]]:
    """Return (name, elements) of an optimizer's tensors in gradient order, equal on all ranks."""
    names = optimizer._parameter_names
    return [(names[p], p.numel()) for p in reversed(reduced_parameters(optimizer))]


def load_pending(memory: OptimizerState, optimizer: Any, process_set: Any) -> None:
    """Load the states that were kept until the nodes are known; CompressError if impossible."""
    states, memory.loaded = memory.loaded, []
    engine_state.load_pending(
        memory.engine, states, memory.nodes, _tensors(optimizer), ranks=process_set.size(),
        rank=process_set.rank(),
    )  # fmt: skip
