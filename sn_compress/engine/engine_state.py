"""What an engine keeps from one run to the next, for one rank, and from all ranks for others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..base.errors import CompressError
from ..base.saved import held, reading
from ..codecs.base import Floats
from .engine import Engine
from .owed import Owed
from .theta import squares

_FORMAT = 1
# By tensor: of all that is remembered of it, from [n] to the shape in which it lies now.
Changes = Mapping[str, Callable[[Floats], Floats]]


def state_dict(engine: Engine, *, ranks: int, rank: int) -> dict[str, Any]:
    """All to go on from bit by bit, by name, as arrays and numbers; it differs between ranks.

    To be called between steps.
    """
    engine.settle()
    engine.new_step()
    return {
        "format": _FORMAT, "ranks": ranks, "rank": rank, "scale": engine.scale,
        "feedback": engine.feedback.state_dict(), "shared": engine.shared.state_dict(),
        "theta": engine.theta.state_dict(), "lost": list(engine.lost),
        "owed": engine.owed.state_dict(),
    }  # fmt: skip


def load_state_dict(
    engine: Engine,
    state: dict[str, Any] | Sequence[dict[str, Any]],
    *,
    ranks: int,
    rank: int,
    changes: Callable[[dict[str, Any]], Changes] = lambda state: {},
) -> None:
    """Take over this rank's state, or the list of all ranks' states, in order of rank.

    From as many ranks as there are now, each takes its own. From another number, each takes the
    mean: what all still have to send together is then what it was. Nothing changes if a state does
    not fit: CompressError.

    changes : from a saved state, what to do with the memories of tensors that lie otherwise now
    """
    with reading("the saved state"):
        states = _chosen(state, ranks, rank)
        _load(engine, states, ranks, changes(states[0]))


def _chosen(state: Any, ranks: int, rank: int) -> list[dict[str, Any]]:
    """The states to take the mean of; or one."""
    held(state)
    states = [state] if isinstance(state, dict) else list(state)
    for entry in states:
        if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
            raise CompressError("not a state of state_dict(); expected what it returned, unchanged")
    saved = states[0]["ranks"] if states else 0
    own = [entry for entry in states if entry["rank"] == rank]
    if saved == ranks and len(own) == 1:
        return own
    if not saved or [entry["rank"] for entry in states] != list(range(saved)):
        raise CompressError(
            f"got states {[entry['rank'] for entry in states]} of {saved} for rank {rank} "
            f"of {ranks}; expected this rank's own, or the list of all that were saved"
        )
    return states


def _load(engine: Engine, states: list[dict[str, Any]], ranks: int, changes: Changes) -> None:
    scale = states[0]["scale"]
    if scale is not None and not (isinstance(scale, float) and 0 < scale < math.inf):
        raise CompressError(f"a saved scale is {scale!r}; expected a number above 0, or None")
    owed = Owed.mean([entry.get("owed", {}) for entry in states])
    for name, change in changes.items():
        owed.change(name, _flat(change))
    lost = [squares(entry.get("lost", (0.0, 0.0))) for entry in states]
    with engine.theta.loading(states[0]):
        _load_exchanges(engine, states, changes)
    # What the ranks' sum was; of other numbers of ranks, each brings its part.
    parts = ranks if len(lost) > 1 else 1
    energy, error = (math.fsum(each) / parts for each in zip(*lost, strict=True))
    engine.lost, engine.owed, engine.scale = (energy, error), owed, scale
    engine.forget_step()


def _load_exchanges(engine: Engine, states: list[dict[str, Any]], changes: Changes) -> None:
    """Both exchanges, or none."""
    shared, feedback = engine.shared.kept(), engine.feedback.kept()
    try:
        engine.shared.load_state_dict(_mean_of_shared([entry["shared"] for entry in states]))
        if len(states) == 1:
            engine.feedback.load_state_dict(states[0]["feedback"])
        else:
            engine.feedback.load_mean([entry["feedback"] for entry in states])
        for name, change in changes.items():
            engine.feedback.change(name, _flat(change))
            engine.shared.move(name, change)
    except Exception:
        engine.shared.put_back(shared)
        engine.feedback.put_back(feedback)
        raise


def _flat(change: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda values: change(values).reshape(-1)


def _mean_of_shared(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of the shared exchange with the mean of the ranks' memories."""
    first = states[0]
    tensors = dict(first["tensors"])
    for name, entry in tensors.items():
        if "summable" in entry and len(states) > 1:
            memories = [state["tensors"][name]["summable"]["memory"] for state in states]
            mean = np.mean(memories, axis=0, dtype=np.float64).astype(np.float32)
            tensors[name] = {**entry, "summable": {**entry["summable"], "memory": mean}}
    return {**first, "tensors": tensors}
