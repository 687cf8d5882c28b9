"""FFTCompression for torch tensors in stock Horovod: the gather exchange.

Per gradient: encode with error feedback, start an all-gather named "sn.<parameter>", hand
Horovod a single zero to all-reduce under the parameter's own name. When Horovod is done with
that zero, `InFlight.finish` waits for the payloads and decodes their mean.
"""

from __future__ import annotations

import copy
import logging
import weakref
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FrameType
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry

from ..codecs import saving
from ..codecs.fft import FFTCodec
from ..errors import CompressError, PayloadError
from ..exchange.gather import mean_of_gathered, on_wire, wire_bytes
from ..exchange.pending import Pending
from ..exchange.session import SMALLEST
from ..settings import Settings
from .caller import Caller, find_caller
from .memory import Memory

_log = logging.getLogger(__name__)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# Optimizers are held weakly: a dropped optimizer takes its memory along.
_of_optimizer: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
_of_calls: dict[tuple[Settings, int], Memory] = {}  # plain hvd.allreduce(compression=...)


@dataclass
class Cast:
    """A small tensor that went uncompressed in a type Horovod can reduce."""

    dtype: torch.dtype

    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        return reduced.to(self.dtype)


@dataclass
class InFlight:
    """A payload on its way."""

    handle: int
    name: str
    memory: Memory
    codec: FFTCodec
    ranks: int
    factor: float  # on the mean: the number of ranks for a sum
    like: torch.Tensor  # shape, dtype and device of the result

    def finish(self, token: torch.Tensor) -> torch.Tensor:
        self.memory.theta.observe(self.name, *token.tolist())
        try:
            gathered = hvd.synchronize(self.handle).numpy()
        except hvd.mpi_ops.HorovodInternalError as error:
            if "join" in str(error).lower():
                raise self._joined() from error
            error.add_note(f"while gathering {self.name}; a rank has ended, or called hvd.join()")
            raise
        try:
            mean = mean_of_gathered(self.codec, gathered, self.ranks, self.like.numel())
        except PayloadError as error:
            # Once the gather is in its response cache, Horovod runs it without asking and puts
            # zeros in the place of a rank that has joined.
            parts = np.array_split(gathered, self.ranks)
            if not all(part.any() for part in parts):
                raise self._joined() from error
            raise
        self.memory.check(mean)
        return _gradient(mean, self.factor, self.like)

    def _joined(self) -> CompressError:
        return CompressError(
            f"{self.name}: another rank called hvd.join(), after which Horovod gathers nothing. "
            "Give all ranks equally many batches (drop_last=True), or train without compression."
        )


@dataclass
class Shown:
    """A gradient on its way uncompressed, of whose mean the shared exchange takes note."""

    memory: Memory
    name: str
    factor: float  # from the mean to what was asked for
    dtype: torch.dtype

    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        mean = reduced.detach().to("cpu", torch.float32).numpy() / np.float32(self.factor)
        self.memory.check(mean)
        self.memory.shared.learn(self.name, mean)
        return reduced.to(self.dtype)


@dataclass
class InRounds:
    """A gradient on its way in the rounds of the shared exchange."""

    memory: Memory
    name: str
    factor: float
    like: torch.Tensor
    sent: int  # bytes

    def finish(self, _: torch.Tensor) -> torch.Tensor:
        mean = self.memory.pending.finish(self.name)
        self.memory.check(mean)
        lost = self.memory.shared.lost(self.name)
        self.memory.traffic.shared(self.name, self.like.numel(), self.sent, *lost)
        return _gradient(mean, self.factor, self.like)


def compress(tensor: torch.Tensor, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """One gradient on its way; see FFTCompression."""
    caller = find_caller(frame, tensor)
    caller = replace(
        caller, op=hvd.mpi_ops.handle_average_backwards_compatibility(caller.op, caller.average)
    )
    if caller.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{caller.name or 'tensor'}: FFTCompression takes op=hvd.Average or hvd.Sum; Adasum, "
            "Min, Max and Product need the dense tensor. Use another op, or no compression."
        )
    memory = _memory_for(caller, settings)
    if caller.optimizer is None and tensor.requires_grad and torch.is_grad_enabled():
        return tensor, None  # a differentiable all-reduce; encoding would cut the graph
    memory.enter(caller.name)
    shared = settings.exchange == "shared"
    # Without a name no rank knows what another one has agreed to.
    smallest = SMALLEST if shared else settings.min_elements
    if tensor.dtype not in _FLOATS or tensor.numel() < smallest or (shared and not caller.name):
        return _send_plain(tensor, caller, memory)
    if caller.name and caller.optimizer is not None:
        ranks, total = caller.process_set.size(), partial(_total, caller.process_set)
        if memory.plain(caller.name, tensor.shape, ranks=ranks, total=total):
            sent = _send_plain(_with_rest(tensor, caller.name, memory), caller, memory)
            if all(p.dtype != torch.bfloat16 for p in caller.optimizer._requires_update):
                memory.stand_aside(caller.optimizer)  # Horovod reduces all of it as it is
            return sent
    return (_send_shared if shared else _send_payload)(tensor, caller, memory)


def _memory_for(caller: Caller, settings: Settings) -> Memory:
    if caller.optimizer is None:
        key = settings, caller.process_set.process_set_id
        if key not in _of_calls:
            _of_calls[key] = Memory(settings, torch.get_num_threads())
        return _of_calls[key]
    if caller.optimizer not in _of_optimizer:
        _of_optimizer[caller.optimizer] = Memory(settings, torch.get_num_threads())
    return _of_optimizer[caller.optimizer]


def _total(process_set: Any, name: str, values: Any) -> Any:
    """The sum over the ranks, at once, for the tuner."""
    wire = torch.from_numpy(values.copy())
    return hvd.allreduce(wire, name=name, op=hvd.Sum, process_set=process_set).numpy()


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


def _gradient(mean: Any, factor: float, like: torch.Tensor) -> torch.Tensor:
    """The mean times the factor, as a fresh tensor: Horovod makes it the storage of p.grad."""
    if factor != 1.0:
        mean *= factor
    return torch.from_numpy(mean).reshape(like.shape).to(like)


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
        wire = torch.from_numpy(shared.whole(name, values)).reshape(tensor.shape)
        wire = wire.to(tensor.device)
        if tensor.dtype != torch.bfloat16:  # Horovod reduces no bfloat16
            wire = wire.to(tensor.dtype)
        memory.traffic.plain(name, tensor.numel(), wire.numel() * wire.element_size())
        return wire, Shown(memory, name, factor, tensor.dtype)

    def start(key: str, words: Any) -> int:
        wire = torch.from_numpy(words)
        return hvd.allreduce_async(wire, name=key, op=hvd.Sum, process_set=caller.process_set)

    rounds = shared.exchange(name, values, ranks=ranks, rank=caller.process_set.rank())
    memory.pending.begin(name, rounds, start, lambda handle: hvd.synchronize(handle).numpy())
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    token = torch.zeros(1, dtype=dtype, device=tensor.device)
    sent = 4 * sum(shared.words(name, ranks)) + token.element_size()
    return token, InRounds(memory, name, factor, tensor.detach(), sent)


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


def report(optimizer: Any) -> dict[str, float]:
    """See FFTCompression.report."""
    memory = _memory_of(optimizer)
    memory.count()
    return memory.traffic.report()


def watch(optimizer: Any, scaler: Any) -> None:
    """See FFTCompression.watch."""
    _memory_of(optimizer).watch(scaler)


def state_dict(optimizer: Any) -> dict[str, Any]:
    """As torch tensors, so that torch.save and torch.load(weights_only=True) take it."""
    state = _memory_of(optimizer).exchange.state_dict()
    return saving.each(np.ndarray, torch.from_numpy, state)  # type: ignore[no-any-return]


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Take over what state_dict returned."""
    arrays = saving.each(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state)
    _memory_of(optimizer).come_back()
    _memory_of(optimizer).exchange.load_state_dict(arrays)


def synchronize(optimizer: Any, root_rank: int) -> None:
    """See FFTCompression.synchronize."""
    own, sets = _memory_of(optimizer).exchange, optimizer.process_set
    _memory_of(optimizer).come_back()
    _memory_of(optimizer).tuner = None  # it counted the steps of other ranks
    state = hvd.broadcast_object(own.state_dict(), root_rank=root_rank, process_set=sets)
    residuals = {}
    for name, n in sorted(own.sizes(state).items()):
        wire = torch.zeros(n + 1)  # the last one counts the ranks that have a memory
        if own.remembers(name):
            wire[:n], wire[n] = torch.from_numpy(own.residual(name)), 1
        total = hvd.allreduce(wire, name=f"sn.memory.{name}", op=hvd.Sum, process_set=sets)
        residuals[name] = (total[:n] / total[n].clamp(min=1)).numpy()
    own.take_over(state, residuals)


class Elastic:
    """What FFTCompression.elastic returns: hvd.elastic.TorchState keeps it as it does a model."""

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
        _memory_of(self.value.optimizer).pending = Pending()
        _memory_of(self.value.optimizer).come_back()
        _memory_of(self.value.optimizer).tuner = None
        load_state_dict(self.value.optimizer, copy.deepcopy(self._saved))

    def sync(self) -> None:
        _memory_of(self.value.optimizer).pending = Pending()
        synchronize(self.value.optimizer, 0)
        self.save()
