"""What an engine keeps from one run to the next, for one rank, and from all ranks for others."""

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
_ARRAY = "array of the file"
# By tensor: of all that is remembered of it, from [n] to the shape in which it lies now.
Changes = Mapping[str, Callable[[Floats], Floats]]


def state_dict(engine: Engine, *, ranks: int, rank: int) -> dict[str, Any]:
    """All to go on from bit by bit, by name, as arrays and numbers; it differs between ranks.

    To be called between steps.
    """
    engine.transaction.settle()
    engine.new_step()
    return {
        "format": _FORMAT, "ranks": ranks, "rank": rank, "scale": engine.transaction.scale,
        "feedback": engine.feedback.state_dict(), "shared": engine.shared.state_dict(),
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
    """Take over this rank's state, or the list of all ranks' states, in order of rank.

    From as many ranks as there are now, each takes its own. From another number, each takes the
    mean: what all still have to send together is then what it was. Nothing changes if a state does
    not fit: CompressError.

    changes : from a saved state, what to do with the memories of tensors that lie otherwise now
    mean : take the mean of a list from as many ranks as there are now, too
    check : of the names of all that is remembered; raises where a tensor is another one now, whose
        memory would never be sent, or sent with gradients that are not its own
    """
    with reading("the saved state"):
        all_states = [state] if isinstance(state, dict) else list(state)
        states = all_states if mean else _chosen(state, ranks, rank)
        check({str(name) for state in states for name in _remembered(state)})
        _load(engine, states, changes(states[0]))


def synchronize(
    engine: Engine,
    *,
    broadcast: Callable[[Any], Any],
    gather: Callable[[Any], Iterable[Any]] | None,
    mean_over: Callable[[str, int, Floats | None], Floats],
) -> None:
    """Give all ranks what ranks share, from a root, and the mean of the memories; all call it.

    broadcast : brings the root's object
    gather : collects an object of every rank; None where there are no nodes
    mean_over : of a tensor's name, its elements and what this rank remembers of it, if it does, the
        mean over the ranks that do, [n]
    """
    exchange = engine.exchange
    mine = {
        **exchange.state_dict(), "theta": engine.theta.state_dict(),
        "scale": engine.transaction.scale,
    }  # fmt: skip
    state = broadcast(mine)
    if gather is not None:
        state = with_rest(state, mine, gather)
    residuals = {
        name: mean_over(name, n, exchange.residual(name) if exchange.remembers(name) else None)
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
    """Load the states that were given before the nodes were known; CompressError if impossible.

    states : those states; None where all ranks have the same state of all tensors
    tensors : see Place.owned_names
    """
    if states is None and nodes is not None:
        states = [state_dict(engine, ranks=1, rank=0)]
    chosen = states_to_load(states, nodes, tensors) if states else None
    if chosen is not None:
        load_state_dict(engine, chosen, ranks=ranks, rank=rank, mean=True)


def to_bytes(state: dict[str, Any], settings: Settings) -> bytes:
    """What state_dict returned as a file of arrays."""
    arrays: list[Any] = []

    def put(array: Any) -> dict[str, int]:
        arrays.append(array)
        return {_ARRAY: len(arrays) - 1}

    tree = registry.map_tree(np.ndarray, put, state)
    # A number of NumPy is none of JSON.
    head = json.dumps(
        {"rank": state["rank"], "exchange": settings.exchange, "state": tree}, default=float
    )
    stream = io.BytesIO()
    named: dict[str, Any] = {str(at): array for at, array in enumerate(arrays)}
    np.savez(stream, head=np.frombuffer(head.encode(), np.uint8), **named)
    return stream.getvalue()


def from_bytes(data: bytes, settings: Settings, rank: int) -> dict[str, Any]:
    """What to_bytes was given on the same rank; CompressError for another's."""

    def array_of(node: dict[str, Any]) -> Any:
        if set(node) == {_ARRAY}:
            return arrays[str(node[_ARRAY])]
        return {key: registry.map_tree(dict, array_of, value) for key, value in node.items()}

    with reading("this error memory"):
        arrays = arrays_of(data)
        head = json.loads(arrays["head"].tobytes())
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
    """Return the states to take the mean of, or this rank's alone."""
    held(state)
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
    """Raise CompressError for a memory of a tensor that there is not, as of a renamed one."""
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
    with engine.theta.loading(states[0]):
        _load_exchanges(engine, states, changes)
    engine.transaction.scale = scale
    engine.forget_step()


def _load_exchanges(engine: Engine, states: list[dict[str, Any]], changes: Changes) -> None:
    """Both exchanges, or none."""
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
    """What a rank has yet to send of a tensor, [n]."""
    if "summable" in entry:
        return entry["summable"]["memory"]
    return entry.get("owed", np.zeros(math.prod(entry["shape"]), np.float32))
