"""Compression of torch tensors in stock Horovod.

Per gradient: encode with error feedback, start a collective of our own named after the parameter,
hand Horovod a single zero to all-reduce under the parameter's own name. When Horovod is done with
that zero, what `in_flight` has of the gradient waits for the others and decodes their mean.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from types import FrameType
from typing import Any, NoReturn

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry

from ..codecs import saving
from ..codecs.gather import on_wire, wire_bytes
from ..errors import CompressError
from ..exchange.pending import Pending
from ..saved import held, reading
from ..settings import Settings
from .alike import Checked, agree_on_calls, agree_on_optimizers, alike_in_hardware, total
from .caller import Caller, find_caller, sparse_gradient
from .in_flight import Cast, InFlight, InRounds, Reducer, Shown
from .memory import Memory

_log = logging.getLogger(__name__)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# Optimizers are held weakly: a dropped optimizer takes its memory along.
_of_optimizer: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
_of_calls: OrderedDict[tuple[Settings, int], Memory] = OrderedDict()  # plain hvd.allreduce
_MOST_CALLS = 64  # settings that calls remember; the same on all ranks, which make the same calls


def compress(tensor: torch.Tensor, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """One gradient on its way; see Compression."""
    caller = find_caller(frame, tensor)
    caller = replace(
        caller, op=hvd.mpi_ops.handle_average_backwards_compatibility(caller.op, caller.average)
    )
    if caller.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{caller.name or 'tensor'}: compression takes op=hvd.Average or hvd.Sum; Adasum, "
            "Min, Max and Product need the dense tensor. Use another op, or no compression."
        )
    memory = _memory_for(caller, settings)
    if caller.optimizer is None and tensor.requires_grad and torch.is_grad_enabled():
        return tensor, None  # a differentiable all-reduce; encoding would cut the graph
    if caller.opens:
        _open(memory, caller)
    memory.enter(caller.name)
    due = caller.opens and caller.optimizer is not None and memory.sameness.step()
    wire, ctx = _send(tensor, caller, memory)
    return wire, Checked.begin(memory, caller.optimizer, ctx) if due else ctx


def _send(tensor: torch.Tensor, caller: Caller, memory: Memory) -> tuple[Any, Any]:
    settings = memory.settings
    shared = settings.exchange == "shared"
    # Without a name no rank knows what another one has agreed to.
    fits = tensor.dtype in _FLOATS and (caller.name or not shared)
    if not fits or not memory.shared.takes(str(caller.name), tensor.shape):
        return _send_plain(tensor, caller, memory)
    if caller.name and caller.optimizer is not None:
        ranks, ask = caller.process_set.size(), partial(total, memory, caller.process_set)
        if memory.plain(caller.name, tensor.shape, ranks=ranks, total=ask):
            sent = _send_plain(_with_rest(tensor, caller.name, memory), caller, memory)
            if all(p.dtype != torch.bfloat16 for p in caller.optimizer._requires_update):
                memory.stand_aside(caller.optimizer)  # Horovod reduces all of it as it is
            return sent
    return (_send_shared if shared else _send_payload)(tensor, caller, memory)


def _open(memory: Memory, caller: Caller) -> None:
    """A step begins, or a call: what is still on its way is of one that failed.

    Before the first of them, and after ranks have come or gone, all ranks agree.
    """
    sets = caller.process_set
    ranks = sets.size()
    if caller.optimizer is None:
        memory.pending = Pending()  # other calls, and other threads, have their own
    else:
        memory.pending.drop()
    if memory.agreed == ranks:
        return
    memory.traffic.speaks = sets.rank() == 0
    if caller.optimizer is None:
        agree_on_calls(memory, sets)
        agreed = [memory]
    else:
        new = agree_on_optimizers(memory, sets, lambda each: _memory_of(each).agreed != ranks)
        agreed = list(map(_memory_of, new))
        for own in agreed:
            if own.agreed is not None:  # ranks have come or gone, and nobody said so
                own.begin_anew()
    if any(own.settings.exchange == "shared" for own in agreed):
        exact = not alike_in_hardware(memory, sets)
        for own in agreed:
            own.shared.exact = exact
    for own in agreed:
        own.agreed = ranks


@cache
def _thread() -> ThreadPoolExecutor:
    """The one in which tensors of all optimizers are encoded."""
    return ThreadPoolExecutor(1, thread_name_prefix="sn_compress-encode")


# Threads do not survive a fork; the child makes its own.
os.register_at_fork(after_in_child=_thread.cache_clear)


def _memory_for(caller: Caller, settings: Settings) -> Memory:
    if caller.optimizer is None:
        return _memory_of_calls(settings, caller.process_set.process_set_id)
    if caller.optimizer not in _of_optimizer:
        _of_optimizer[caller.optimizer] = Memory(settings, torch.get_num_threads())
    return _of_optimizer[caller.optimizer]


def _memory_of_calls(settings: Settings, process_set: int) -> Memory:
    key = settings, process_set
    if key not in _of_calls:
        _of_calls[key] = Memory(settings, torch.get_num_threads())
        if len(_of_calls) > _MOST_CALLS:
            _of_calls.popitem(last=False)
            _say_dropped_once()
    _of_calls.move_to_end(key)
    return _of_calls[key]


def _with_rest(tensor: torch.Tensor, name: str, memory: Memory) -> torch.Tensor:
    """The gradient, and what the exchange it leaves has not sent of it yet."""
    rest = memory.release(name)
    if rest is None:
        return tensor
    return tensor + torch.from_numpy(rest).reshape(tensor.shape).to(tensor)


def _send_plain(tensor: torch.Tensor, caller: Caller, memory: Memory) -> tuple[Any, Any]:
    wire, ctx = tensor, None
    if tensor.dtype == torch.bfloat16:  # Horovod reduces no bfloat16
        wire, ctx = tensor.float(), Cast(tensor.dtype)
    memory.traffic.plain(caller.name, tensor.numel(), wire.numel() * wire.element_size())
    return wire, ctx


def count_sparse(frame: FrameType) -> None:
    """Count what this rank has sent of a sparse gradient: all ranks' are gathered as they are."""
    optimizer, parameter = sparse_gradient(frame)
    own = parameter.grad
    parts = own._indices(), own._values()
    nbytes = sum(part.numel() * part.element_size() for part in parts)
    memory = _memory_of(optimizer)
    memory.traffic.sparse(optimizer._parameter_names[parameter], own._values().numel(), nbytes)


def _on_host(tensor: torch.Tensor) -> Any:
    """The tensor's values, [n] float32."""
    if tensor.device.type != "cpu":
        _say_host_once(tensor.device.type)
    return tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()


def _send_shared(tensor: torch.Tensor, caller: Caller, memory: Memory) -> tuple[Any, Any]:
    name, shared = str(caller.name), memory.shared
    values = _on_host(tensor)
    ranks = caller.process_set.size()
    factor = caller.scale * (ranks if caller.op == hvd.Sum else 1)
    if shared.dense(name, tensor.shape):
        # Horovod reduces no bfloat16; what half precision takes is sent later.
        kind = np.float16 if tensor.dtype == torch.float16 else np.float32
        wire = torch.from_numpy(shared.whole(name, values, wire=kind)).reshape(tensor.shape)
        wire = wire.to(tensor.device)
        memory.traffic.dense(name, tensor.numel(), wire.numel() * wire.element_size())
        return wire, Shown(memory, name, factor, tensor.dtype)

    rank = caller.process_set.rank()
    rounds = partial(shared.exchange, name, values, ranks=ranks, rank=rank)
    beside = memory.settings.overlap and caller.optimizer is not None
    wire = Reducer(caller.process_set, memory.settings.wait_s)
    memory.pending.begin(name, rounds, wire, _thread() if beside else None)
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    token = torch.zeros(1, dtype=dtype, device=tensor.device)
    return token, InRounds(memory, name, factor, tensor.detach(), ranks, memory.pending)


def _send_payload(tensor: torch.Tensor, caller: Caller, memory: Memory) -> tuple[Any, Any]:
    codec, payload = memory.encode(caller.name, _on_host(tensor))
    ranks = caller.process_set.size()
    name = None if caller.name is None else f"sn.{caller.name}"
    handle = hvd.allgather_async(
        torch.from_numpy(on_wire(payload.buffer)), name=name, process_set=caller.process_set
    )
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    told = memory.theta.tell(payload, wide=dtype == torch.float32)
    token = torch.tensor(told, dtype=dtype, device=tensor.device)
    extra = token.nbytes + wire_bytes(payload.nbytes) - payload.nbytes
    if memory.traffic.payload(caller.name, tensor.numel(), payload, extra):
        _log.warning(
            "%s: values beyond the fixed window were clipped; see `saturated` in the report",
            caller.name,
        )
    factor = caller.scale * (ranks if caller.op == hvd.Sum else 1)
    like = tensor.detach()
    return token, InFlight(handle, caller.name or "tensor", memory, codec, ranks, factor, like)


@cache
def _say_dropped_once() -> None:
    _log.warning(
        "hvd.allreduce was called with compressions of more than %d settings: what those used "
        "longest ago remember is dropped. Make one with using(...) and keep it.",
        _MOST_CALLS,
    )


@cache
def _say_host_once(device: str) -> None:
    _log.warning("gradients on %s are copied to the host and encoded there", device)


def _memory_of(optimizer: Any) -> Memory:
    compression = getattr(optimizer, "_compression", None)
    settings = getattr(compression, "settings", None)
    if not isinstance(settings, Settings):
        raise CompressError(
            f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer(..., "
            "compression=FFTCompression); pass the optimizer that it returned"
        )
    if optimizer not in _of_optimizer:
        _of_optimizer[optimizer] = Memory(settings, torch.get_num_threads())
    return _of_optimizer[optimizer]


def _exchange_of(optimizer: Any) -> Any:
    """Where the memories are, with nothing still being encoded."""
    memory = _memory_of(optimizer)
    memory.pending.settle()
    return memory.exchange


def report(optimizer: Any) -> dict[str, float]:
    """See Compression.report."""
    memory = _memory_of(optimizer)
    memory.count()
    tuned = memory.tuner.report() if memory.tuner else {}
    return memory.traffic.report() | tuned


def watch(optimizer: Any, scaler: Any) -> None:
    """See Compression.watch."""
    _memory_of(optimizer).watch(scaler)


def residuals(optimizer: Any) -> dict[str, torch.Tensor]:
    """See Compression.residuals."""
    own, decay = _exchange_of(optimizer), optimizer._compression.settings.decay
    return {
        name: torch.from_numpy(own.residual(name) * np.float32(decay)).view_as(parameter)
        for parameter, name in optimizer._parameter_names.items()
        if own.remembers(name)
    }


def restart(optimizer: Any, residuals: Any) -> NoReturn:
    """Always CompressError: in torch, the optimizer is wrapped anew."""
    raise CompressError(
        f"got a {type(optimizer).__name__} and {len(residuals)} residuals; expected an optimizer "
        "of Keras. In torch, wrap the optimizer anew, and begin with residuals as gradients."
    )


def state_dict(optimizer: Any) -> dict[str, Any]:
    """As torch tensors, so that torch.save and torch.load(weights_only=True) take it."""
    state = _exchange_of(optimizer).state_dict()
    if theta := _memory_of(optimizer).theta.state_dict():
        state = {**state, "theta": theta}
    return saving.each(np.ndarray, torch.from_numpy, state)  # type: ignore[no-any-return]


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Take over what state_dict returned."""
    with reading("the saved state"):
        held(state)
        arrays = saving.each(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state)
    _memory_of(optimizer).come_back()
    with _memory_of(optimizer).theta.loading(arrays):
        _exchange_of(optimizer).load_state_dict(arrays)


def synchronize(optimizer: Any, root_rank: int) -> None:
    """See Compression.synchronize."""
    own, sets = _exchange_of(optimizer), optimizer.process_set
    _memory_of(optimizer).begin_anew()
    theta = _memory_of(optimizer).theta
    state = {**own.state_dict(), "theta": theta.state_dict()}
    state = hvd.broadcast_object(state, root_rank=root_rank, process_set=sets)
    residuals = {}
    for name, n in sorted(own.sizes(state).items()):
        wire = torch.zeros(n + 1)  # the last one counts the ranks that have a memory
        if own.remembers(name):
            wire[:n], wire[n] = torch.from_numpy(own.residual(name)), 1
        total = hvd.allreduce(wire, name=f"sn.memory.{name}", op=hvd.Sum, process_set=sets)
        residuals[name] = (total[:n] / total[n].clamp(min=1)).numpy()
    own.take_over(state, residuals)
    theta.load_state_dict(state["theta"])  # ranks that came are where the others are


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
        _memory_of(self.value.optimizer).pending.drop()
        _memory_of(self.value.optimizer).begin_anew()
        load_state_dict(self.value.optimizer, copy.deepcopy(self._saved))

    def sync(self) -> None:
        _memory_of(self.value.optimizer).pending.drop()
        synchronize(self.value.optimizer, 0)
        self.save()
