"""Saving and loading the state of an engine, also for a different number of ranks."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..allreduce.exchange import AllReduceExchange
from ..codecs import registry
from ..codecs.base import Floats
from ..consistency import Total
from ..errors import CompressError
from ..saved import arrays_of, held, reading
from ..settings import Settings
from .engine import Engine
from .feedback import ErrorFeedback
from .hierarchy import Place, loadable, saved_elsewhere, states_to_load, with_rest

_FORMAT = 1
_ARRAY = "array of the file"  # the only key of a node that refers to an array
# For tensors whose layout has changed: maps [n], as saved, to their shape now.
Changes = Mapping[str, Callable[[Floats], Floats]]


def state_dict(
    engine: Engine, *, ranks: int, rank: int, without_held: bool = False
) -> dict[str, Any]:
    """Return what is needed to resume bit by bit, as arrays and numbers; it differs between ranks.

    Called between steps.

    without_held : exclude residuals of gradients still held in `.grad`, which is not checkpointed:
        a resumed run will not apply these gradients
    """
    # Settle the outcome of the last step, so that its residuals are final, and no step stays open.
    engine.transaction.settle()
    engine.new_step()
    held = engine.transaction.held if without_held else ()
    return {
        "format": _FORMAT, "ranks": ranks, "rank": rank, "scale": engine.transaction.scale,
        "feedback": engine.feedback.state_dict(held), "shared": engine.shared.state_dict(held),
        "theta": engine.theta.state_dict(),
    }  # fmt: skip


def load_state_dict(
    engine: Engine,
    state: dict[str, Any] | Sequence[dict[str, Any]],
    *,
    ranks: int,
    rank: int,
    changes: Callable[[dict[str, Any]], Changes] = lambda state: {},
    mean: bool = False,
    check: Callable[[Collection[str]], None] = lambda names: None,
) -> None:
    """Load this rank's state, or the list of all ranks' states, in rank order.

    With the number of ranks unchanged, each rank loads its own state. Otherwise each loads the
    mean, which preserves the mean residual over all ranks. CompressError, and nothing changes, if a
    state does not fit.

    changes : given a saved state, returns how to convert memories whose layout has changed
    mean : load the mean of a list even if the number of ranks is unchanged
    check : called with the names of all memories; raises if one does not belong to a tensor of this
        run, as it would never be sent, or would be sent with another tensor's gradients
    """
    with reading("the saved state"):
        all_states = [state] if isinstance(state, dict) else list(state)
        states = all_states if mean else _chosen(state, ranks, rank)
        check({str(name) for state in states for name in _remembered(state)})
        _load(engine, states, changes(states[0]))


def start_empty(engine: Engine) -> None:
    """Reset all memories and step counts, as before the first step."""
    new = Engine(engine.settings, 1, stock="", tuner=None)
    load_state_dict(engine, state_dict(new, ranks=1, rank=0), ranks=1, rank=0)


def synchronize(
    engine: Engine,
    *,
    broadcast: Callable[[Any], Any],
    gather: Callable[[Any], Iterable[Any]] | None,
    total: Total,
) -> None:
    """Give all ranks the root's shared state and the mean of the memories; all ranks call it.

    broadcast : returns the root's object
    gather : collects an object from every rank; None if there are no nodes
    total : sums a vector, with the given name, over the ranks
    """
    exchange = engine.exchange
    mine = {
        **exchange.state_dict(), "theta": engine.theta.state_dict(),
        "scale": engine.transaction.scale,
    }  # fmt: skip
    state = broadcast(mine)
    if gather is not None:
        state = with_rest(state, mine, gather)
    residuals = {}
    # Sorted: each name is a collective, and ranks may have seen tensors in different orders.
    for name, n in sorted(exchange.sizes(state).items()):
        words = np.zeros(n + 1, np.float32)  # the last one counts the ranks that know the tensor
        if (residual := exchange.unsent(name)) is not None:
            words[:n], words[n] = residual, 1
        summed = total(f"sn.memory.{name}", words)
        residuals[name] = summed[:n] / max(summed[n], 1)
    exchange.load_with_residuals(state, residuals)
    engine.theta.load_state_dict(state["theta"])  # new ranks join at the others' step
    engine.transaction.scale = state["scale"]
    engine.forget_step()


class NodeStates:
    """The place of this rank in the hierarchy, and states loaded before that was known.

    A state is loaded immediately, so that errors are raised by that call; and loaded again once the
    nodes are known, if it was saved with different ones.

    Attributes
    ----------
    place : None if all ranks exchange with all others, or before it is known
    loaded : states, until the place is known; None: all ranks have the same state of all tensors
    """

    def __init__(self, engine: Engine) -> None:
        self.place: Place | None = None
        self.loaded: list[dict[str, Any]] | None = []
        self._all_states: Callable[[], Sequence[dict[str, Any]]] | None = None
        self._engine = engine

    def saved(self, ranks: int) -> dict[str, Any] | None:
        """Return what to save about nodes; until they are known, that of a loaded state."""
        if self.place is not None:
            return self.place.state()
        loaded = self.loaded
        # For another number of ranks, `loadable` has merged the states, which have no nodes now.
        merged = not loaded or (len(loaded) > 1 and loaded[0]["ranks"] != ranks)
        return None if merged else loaded[0].get("hierarchy")  # type: ignore[index]

    def load(
        self,
        state: Any,
        *,
        ranks: int,
        rank: int,
        own: bool = False,
        all_states: Callable[[], Sequence[dict[str, Any]]] | None = None,
        **how: Any,
    ) -> None:
        """Load this rank's state, or the list of all ranks', as load_state_dict does.

        own : treat a single state as this rank's, whichever rank has saved it
        all_states : returns the list; called if the state turns out to be saved with other nodes
        """
        single = isinstance(state, dict)
        fits = state | {"ranks": ranks, "rank": rank} if single and own else loadable(state, ranks)
        load_state_dict(self._engine, fits, ranks=ranks, rank=rank, **how)
        self.loaded, self._all_states = [state] if single else list(state), all_states

    def settle(
        self, tensors: Iterable[tuple[str, int]], *, ranks: int, rank: int, **how: Any
    ) -> None:
        """Load again what was loaded before nodes were known; CompressError if it does not fit.

        tensors : see Place.owned_names
        """
        states, self.loaded = self.loaded, []
        all_states, self._all_states = self._all_states, None
        if states and all_states is not None and saved_elsewhere(states[0], self.place):
            states = list(all_states())
        # Treat it as the state of a single rank, of which this rank keeps what it owns.
        if states is None and self.place is not None:
            states = [state_dict(self._engine, ranks=1, rank=0)]
        chosen = states_to_load(states, self.place, tensors) if states else None
        if chosen is not None:
            load_state_dict(self._engine, chosen, ranks=ranks, rank=rank, mean=True, **how)


def to_bytes(state: dict[str, Any], settings: Settings) -> bytes:
    """Write what state_dict returned as a file of arrays."""
    arrays: list[Any] = []

    def put(array: Any) -> dict[str, int]:
        arrays.append(array)
        return {_ARRAY: len(arrays) - 1}

    tree = registry.map_tree(np.ndarray, put, state)
    # JSON cannot encode NumPy's numbers: convert them to floats.
    head = json.dumps(
        {"rank": state["rank"], "exchange": settings.exchange, "state": tree}, default=float
    )
    stream = io.BytesIO()
    named: dict[str, Any] = {str(at): array for at, array in enumerate(arrays)}
    np.savez(stream, head=np.frombuffer(head.encode(), np.uint8), **named)
    return stream.getvalue()


def from_bytes(data: bytes, settings: Settings, rank: int) -> dict[str, Any]:
    """Read what to_bytes wrote on the same rank; CompressError if another rank did."""

    def array_of(node: dict[str, Any]) -> Any:
        if set(node) == {_ARRAY}:
            return arrays[str(node[_ARRAY])]
        return {key: registry.map_tree(dict, array_of, value) for key, value in node.items()}

    with reading("this error memory"):
        arrays = arrays_of(data)
        head = json.loads(arrays["head"].tobytes())
        # Another rank's memory would have the right shape, but be wrong.
        if (head["rank"], head["exchange"]) != (rank, settings.exchange):
            raise CompressError(
                f"this error memory belongs to rank {head['rank']} and the {head['exchange']} "
                f"exchange; expected rank {rank} and the {settings.exchange} exchange of "
                f"{settings.compression}. Save one checkpoint per rank, with the rank in its name, "
                "and resume with the same compression."
            )
        state: dict[str, Any] = registry.map_tree(dict, array_of, head["state"])
    return state


def _chosen(state: Any, ranks: int, rank: int) -> list[dict[str, Any]]:
    """Return this rank's state, or all states whose mean is to be loaded."""
    held(state)  # rejects arrays that have more elements than memory (zero strides)
    states = [state] if isinstance(state, dict) else list(state)
    for entry in states:
        if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
            raise CompressError("not a state of state_dict(); expected what it returned, unchanged")
    saved = states[0]["ranks"] if states else 0
    of_rank = [entry for entry in states if entry["rank"] == rank]
    if saved == ranks and len(of_rank) == 1:
        return of_rank
    if not saved or [entry["rank"] for entry in states] != list(range(saved)):
        raise CompressError(
            f"got states {[entry['rank'] for entry in states]} of {saved} for rank {rank} "
            f"of {ranks}; expected this rank's own, or the list of all that were saved"
        )
    return states


def _remembered(state: dict[str, Any]) -> dict[str, Any]:
    return {**state["feedback"]["memory"], **state["shared"]["tensors"]}


def check_names(names: Collection[str], remembered: Collection[str]) -> None:
    """Raise CompressError for a memory of a tensor that does not exist, e.g. a renamed one."""
    if unknown := sorted(set(remembered) - set(names)):
        raise CompressError(
            f"the saved state remembers {_some(unknown)}, which the model does not have; expected "
            f"its names: {_some(sorted(names)) or 'none were given'}. Pass the named_parameters "
            "of the module whose names were saved: DDP puts 'module.' before them, torch.compile "
            "'_orig_mod.'. Where layers have changed, begin without the state."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" * (len(names) > 3))


def _load(engine: Engine, states: list[dict[str, Any]], changes: Changes) -> None:
    scale = states[0]["scale"]
    if scale is not None and not (isinstance(scale, float) and 0 < scale < math.inf):
        raise CompressError(f"a saved scale is {scale!r}; expected a number above 0, or None")
    # Each part is rolled back if a later one does not fit. What cannot fail comes last.
    with engine.theta.loading(states[0]):
        _load_exchanges(engine, states, changes)
    engine.transaction.scale = scale
    engine.forget_step()


def _load_exchanges(engine: Engine, states: list[dict[str, Any]], changes: Changes) -> None:
    """Load both exchanges, or neither."""
    shared, feedback = engine.shared.snapshot(), engine.feedback.snapshot()
    try:
        load_mean(engine.shared, [entry["shared"] for entry in states])
        load_mean(engine.feedback, [entry["feedback"] for entry in states])
        for name, change in changes.items():
            engine.feedback.change(name, _flat(change))
            engine.shared.move(name, change)
    except Exception:
        engine.shared.restore(shared)
        engine.feedback.restore(feedback)
        raise


def _flat(change: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda values: change(values).reshape(-1)


def load_mean(
    exchange: ErrorFeedback | AllReduceExchange, states: Sequence[dict[str, Any]]
) -> None:
    """Load the shared state, and the mean of all ranks' residuals.

    If all ranks of a run start with it, the mean residual is preserved, whatever their number. A
    name that a rank does not have counts as zero.
    """
    exchange.load_state_dict(states[0])
    if len(states) == 1:
        return
    sums: dict[str, npt.NDArray[np.float64]] = {}
    for state in states:
        exchange.load_state_dict(state)
        for name in exchange.sizes(state):
            residual = np.asarray(exchange.unsent(name), np.float64)
            if name in sums and sums[name].shape != residual.shape:
                raise CompressError(
                    f"{name!r} has {residual.size} elements in one state and {sums[name].size} in "
                    "another; expected those of one run"
                )
            sums[name] = sums[name] + residual if name in sums else residual
    means = {name: (summed / len(states)).astype(np.float32) for name, summed in sums.items()}
    exchange.load_with_residuals(states[0], means)
