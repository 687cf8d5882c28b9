"""What an optimizer of Horovod's torch has yet to send: saved, loaded, shared with other ranks."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry

from ...base.errors import CompressError
from ...base.saved import held, reading
from ...codecs import saving
from ...engine import engine_state
from .memory import Memory, memory_of


def _at_rest(optimizer: Any) -> Memory:
    memory = memory_of(optimizer)
    memory.rest()
    return memory


def residuals(optimizer: Any) -> dict[str, torch.Tensor]:
    """See Compression.residuals."""
    engine = _at_rest(optimizer).engine
    return {
        name: torch.from_numpy(engine.residual(name)).view_as(parameter)
        for parameter, name in optimizer._parameter_names.items()
        if engine.remembers(name)
    }


def restart(optimizer: Any, residuals: Any) -> NoReturn:
    """Always CompressError: in torch, the optimizer is wrapped anew."""
    raise CompressError(
        f"got a {type(optimizer).__name__} and {len(residuals)} residuals; expected an optimizer "
        "of Keras. In torch, wrap the optimizer anew, and begin with residuals as gradients."
    )


def state_dict(optimizer: Any) -> dict[str, Any]:
    """As torch tensors, so that torch.save and torch.load(weights_only=True) take it."""
    memory, place = _at_rest(optimizer), _place(optimizer)
    memory.outcomes.look()
    engine = memory.engine
    state = engine_state.state_dict(engine, **place)
    return saving.each(np.ndarray, torch.from_numpy, state)  # type: ignore[no-any-return]


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Take over what state_dict returned, on whichever rank, or the list of all ranks' states."""
    with reading("the saved state"):
        held(state)
        arrays = saving.each(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state)
    place = _place(optimizer)
    if isinstance(arrays, dict):
        arrays = arrays | place
    memory = _at_rest(optimizer)
    memory.come_back()
    engine_state.load_state_dict(memory.engine, arrays, ranks=place["ranks"], rank=place["rank"])


def _place(optimizer: Any) -> dict[str, int]:
    sets = optimizer.process_set
    here = sets.included()
    return {"ranks": sets.size() if here else 1, "rank": sets.rank() if here else 0}


def synchronize(optimizer: Any, root_rank: int) -> None:
    """See Compression.synchronize."""
    memory, sets = _at_rest(optimizer), optimizer.process_set
    memory.begin_anew()
    engine = memory.engine
    own = engine.exchange
    state = {**own.state_dict(), "theta": engine.theta.state_dict(), "scale": engine.scale}
    state = hvd.broadcast_object(state, root_rank=root_rank, process_set=sets)
    residuals = {}
    for name, n in sorted(own.sizes(state).items()):
        wire = torch.zeros(n + 1)  # the last one counts the ranks that have a memory
        if own.remembers(name):
            wire[:n], wire[n] = torch.from_numpy(own.residual(name)), 1
        total = hvd.allreduce(wire, name=f"sn.memory.{name}", op=hvd.Sum, process_set=sets)
        residuals[name] = (total[:n] / total[n].clamp(min=1)).numpy()
    own.take_over(state, residuals)
    engine.theta.load_state_dict(state["theta"])  # ranks that came are where the others are
    engine.scale = state["scale"]
    engine.forget_step()


class Elastic:
    """What Compression.elastic returns: hvd.elastic.TorchState keeps it as it does a model."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        if Elastic not in (kind for kind, _ in get_handler_registry()):
            get_handler_registry().append((Elastic, _ElasticHandler))


class _ElasticHandler(StateHandler):
    def __init__(self, value: Elastic) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(state_dict(self.value.optimizer))

    def restore(self) -> None:
        self._give_up()
        memory_of(self.value.optimizer).begin_anew()
        load_state_dict(self.value.optimizer, copy.deepcopy(self._saved))

    def sync(self) -> None:
        self._give_up()
        synchronize(self.value.optimizer, 0)
        self.save()

    def _give_up(self) -> None:
        memory = memory_of(self.value.optimizer)
        memory.give_up()
        memory.forget_sent()  # Horovod was started anew, or nothing broke off
