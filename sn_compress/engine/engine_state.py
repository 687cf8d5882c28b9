"""The saved state of an engine: of this rank, or of all ranks for another number of them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..codecs import registry
from ..codecs.base import Floats
from ..errors import CompressError
from ..saved import arrays_of, held, reading
from ..settings import Settings
from .engine import Engine
from .hierarchy import Place, states_to_load, with_rest

_FORMAT = 1
_ARRAY = "array of the file"  # the only key of a node that stands for an array
# For tensors whose layout has changed: from [n], as saved, to their shape now.
Changes = Mapping[str, Callable[[Floats], Floats]]


def state_dict(
    engine: Engine, *, ranks: int, rank: int, without_held: bool = False
) -> dict[str, Any]:
    """All that is needed to resume bit by bit, as arrays and numbers; it differs between ranks.

    Called between steps.

    without_held : leave out what was left out of gradients that still wait in `.grad`, which no
        checkpoint has: a run that resumes will not apply them
    """
    # Residuals of the last step are saved as its outcome has them, and no step is left open.
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
    """Load this rank's state, or the list of all ranks' states, in order of rank.

    From as many ranks as there are now, each loads its own. From another number, each loads the
    mean, so that what all still have to send together stays the same. CompressError, and nothing
    changes, if a state does not fit.

    changes : from a saved state, what to do with memories of tensors whose layout has changed
    mean : load the mean of a list from as many ranks as there are now, too
    check : called with the names of all that is remembered; raises where one is of another tensor
        now, whose memory would never be sent, or would be sent with gradients that are not its own
    """
    with reading("the saved state"):
        all_states = [state] if isinstance(state, dict) else list(state)
        states = all_states if mean else _chosen(state, ranks, rank)
        check({str(name) for state in states for name in _remembered(state)})
        _load(engine, states, changes(states[0]))


def start_empty(engine: Engine) -> None:
    """Forget what was remembered and how far it has come, as before the first step."""
    new = Engine(engine.settings, 1, stock="", tuner=None)
    load_state_dict(engine, state_dict(new, ranks=1, rank=0), ranks=1, rank=0)


def synchronize(
    engine: Engine,
    *,
    broadcast: Callable[[Any], Any],
    gather: Callable[[Any], Iterable[Any]] | None,
    mean_over: Callable[[str, int, Floats | None], Floats],
) -> None:
    """Give all ranks what ranks share, from a root, and the mean of the memories; all call it.

    broadcast : returns the root's object
    gather : collects an object of every rank; None where there are no nodes
    mean_over : from a tensor's name, its elements and what this rank has yet to send of it,
        None if it does not know the tensor, the mean over the ranks that do, [n]
    """
    exchange = engine.exchange
    mine = {
        **exchange.state_dict(), "theta": engine.theta.state_dict(),
        "scale": engine.transaction.scale,
    }  # fmt: skip
    state = broadcast(mine)
    if gather is not None:
        state = with_rest(state, mine, gather)
    # Sorted, as each name is a collective, and ranks may have met tensors in another order.
    residuals = {
        name: mean_over(name, n, exchange.unsent(name))
        for name, n in sorted(exchange.sizes(state).items())
    }
    exchange.load_with_residuals(state, residuals)
    engine.theta.load_state_dict(state["theta"])  # new ranks resume where the others are
    engine.transaction.scale = state["scale"]
    engine.forget_step()


def load_pending(
    engine: Engine,
    states: Sequence[dict[str, Any]] | None,
    nodes: Place | None,
    tensors: Iterable[tuple[str, int]],
    *,
    ranks: int,
    rank: int,
) -> None:
    """Load states that were passed before nodes were known; CompressError if they do not fit.

    states : None where all ranks have the same state of all tensors
    tensors : see Place.owned_names
    """
    # As the state of one rank of one, of which this rank keeps what it owns.
    if states is None and nodes is not None:
        states = [state_dict(engine, ranks=1, rank=0)]
    chosen = states_to_load(states, nodes, tensors) if states else None
    if chosen is not None:
        load_state_dict(engine, chosen, ranks=ranks, rank=rank, mean=True)


def to_bytes(state: dict[str, Any], settings: Settings) -> bytes:
    """Write what state_dict returned as a file of arrays."""
    arrays: list[Any] = []

    def put(array: Any) -> dict[str, int]:
        arrays.append(array)
        return {_ARRAY: len(arrays) - 1}

    tree = registry.map_tree(np.ndarray, put, state)
    # JSON does not know NumPy's numbers: by default they are floats.
    head = json.dumps(
        {"rank": state["rank"], "exchange": settings.exchange, "state": tree}, default=float
    )
    stream = io.BytesIO()
    named: dict[str, Any] = {str(at): array for at, array in enumerate(arrays)}
    np.savez(stream, head=np.frombuffer(head.encode(), np.uint8), **named)
    return stream.getvalue()


def from_bytes(data: bytes, settings: Settings, rank: int) -> dict[str, Any]:
    """Read what to_bytes wrote on the same rank; CompressError for another's."""

    def array_of(node: dict[str, Any]) -> Any:
        if set(node) == {_ARRAY}:
            return arrays[str(node[_ARRAY])]
        return {key: registry.map_tree(dict, array_of, value) for key, value in node.items()}

    with reading("this error memory"):
        arrays = arrays_of(data)
        head = json.loads(arrays["head"].tobytes())
        # Another rank's memory would fit in shape, and be wrong.
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
    """Return this rank's state, or all of those whose mean is loaded."""
    held(state)  # for its refusal of arrays that show more elements than they have in memory
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
    """Raise CompressError for a memory of a tensor that does not exist, as of a renamed one."""
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
    # Each restores what it had if the rest does not fit. What cannot fail comes last.
    with engine.theta.loading(states[0]):
        _load_exchanges(engine, states, changes)
    engine.transaction.scale = scale
    engine.forget_step()


def _load_exchanges(engine: Engine, states: list[dict[str, Any]], changes: Changes) -> None:
    """Load both exchanges, or none."""
    shared, feedback = engine.shared.snapshot(), engine.feedback.snapshot()
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
        engine.shared.restore(shared)
        engine.feedback.restore(feedback)
        raise


def _flat(change: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda values: change(values).reshape(-1)


def _mean_of_shared(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the shared exchange's state with the mean of the ranks' memories."""
    # All else in it is the same on all ranks.
    first = states[0]
    tensors = dict(first["tensors"])
    for name, entry in tensors.items():
        entries = [state["tensors"][name] for state in states]
        if len(states) == 1 or not any({"summable", "owed"} & saved.keys() for saved in entries):
            continue
        memories = [_memory(saved) for saved in entries]
        mean = np.asarray(np.mean(memories, axis=0, dtype=np.float64), np.float32)
        summable = {**entry["summable"], "memory": mean} if "summable" in entry else mean
        tensors[name] = {**entry, "summable" if "summable" in entry else "owed": summable}
    return {**first, "tensors": tensors}


def _memory(entry: dict[str, Any]) -> Any:
    """The residual of a tensor in a saved state, [n]; zeros without one."""
    if "summable" in entry:
        return entry["summable"]["memory"]
    return entry.get("owed", np.zeros(math.prod(entry["shape"]), np.float32))
