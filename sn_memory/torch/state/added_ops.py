"""The ops of a plan with state on the host that are no calls of the model: who carries them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from ...graph.hosted import FETCH, FETCH_STATE, STATE, STORE, STORE_GRADIENT, UPDATE
from ..eager.instructions import Instruction, Take
from ..trace.record import View
from ..trace.to_graph import Named
from ..trace.trace import Trace
from .owned import Owned
from .transfers import FetchOf, FetchStateOf, StoreGradientOf, StoreOf, UpdateOf


class Steps(Protocol):
    """Who knows of the steps of a model."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def without_updates(self) -> AbstractContextManager[None]: ...


class AddedOps:
    """Carries out the ops of `with_state`; see `Added` of eager/added.py.

    Parameters
    ----------
    owned
        The parameters, by path.
    named, traced
        The graph with these ops, and the step without them.
    steps
        Who is told that a step begins, and lets none update.
    """

    def __init__(
        self, owned: Mapping[str, Owned], named: Named, traced: Trace, steps: Steps
    ) -> None:
        captured = traced.captured
        self.owned, self.named = owned, named
        self.forms = dict(captured.parameters)
        self.gradients = dict(captured.gradients)
        self.places = {name: place for place, (name, _) in enumerate(captured.gradients)}
        self.storages = max(named.storage_of.values()) + 1
        made = {it for op in named.graph.ops if op.kind == "fetch" for it in op.outputs}
        self.brought = frozenset(view.storage for name, view in captured.parameters if name in made)
        self.used_up = frozenset(
            op.name.removeprefix(prefix)
            for op in named.graph.ops
            for prefix in (UPDATE, STORE_GRADIENT)
            if op.kind in ("update", "store") and op.name.startswith(prefix)
        )
        self.begin, self.end = steps.begin, steps.end
        self.without_updates = steps.without_updates
        self.kinds = {op.name: op.kind for op in named.graph.ops}

    def moves(self, op: str) -> tuple[int, ...] | None:
        """Return the storages that an op lets a lane read or write; None if it is a call."""
        kind = self.kinds[op]
        if kind not in ("fetch", "update", "store") or op in self.named.call_of:
            return None
        record = self.named.graph.ops[self.named.graph.op_index[op]]
        moved = record.outputs if kind == "fetch" else record.inputs if kind == "store" else ()
        return tuple(self.named.storage_of[it] for it in moved)

    def instruction(self, op: str, take: Callable[[View], Take]) -> Instruction:
        """Return what carries an op out."""
        number = self.named.storage_of
        if op.startswith(FETCH_STATE):
            name = op.removeprefix(FETCH_STATE)
            return FetchStateOf(self.owned[name], number[name + STATE])
        if op.startswith(FETCH):
            name = op.removeprefix(FETCH)
            return FetchOf(self.owned[name], number[name], self.forms[name])
        if op.startswith(STORE_GRADIENT):
            name = op.removeprefix(STORE_GRADIENT)
            gradient = self.gradients[name]
            assert gradient is not None
            return StoreGradientOf(
                self.owned[name], gradient.storage, take(gradient), self.places[name]
            )
        name = op.removeprefix(UPDATE).removeprefix(STORE)
        owned = self.owned[name]
        # In place nothing of it is brought.
        storage = number[name] if owned.place == "host" and owned.by == "device" else None
        state = number.get(name + STATE)
        if op.startswith(STORE):
            return StoreOf(owned, storage, state, self.places[name])
        gradient = self.gradients[name]
        assert gradient is not None
        return UpdateOf(owned, storage, state, take(gradient), self.places[name])
