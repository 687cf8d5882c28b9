"""Compression of torch tensors in stock Horovod.

Horovod passes every gradient of an optimizer to `compress` before it waits for any mean. `compress`
adds the gradient to its bucket. A complete bucket starts its collectives on the device of the
gradients, and the means are written into the gradients. When Horovod waits for the first mean,
`in_flight` starts the incomplete buckets and waits for all. `hooks` has the handles that Horovod
waits for.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, lru_cache, partial
from types import FrameType
from typing import Any

import torch

from ..collective import Buckets, Gradient
from ..errors import CompressError
from ..settings import Settings
from .process_group import CallWatch
from .under_horovod import hvd
from .under_horovod.agreement import (
    CheckedHandle,
    Elastic,
    agree_on_calls,
    agree_on_fresh,
    agree_on_number,
    agree_on_optimizers,
    alike_in_hardware,
    end_broken_rounds,
    find_nodes,
    follow_restarts,
    load_state_dict,
    ordered_tensors,
    reduced_parameters,
    residuals,
    restart,
    state_dict,
    synchronize,
    total,
)
from .under_horovod.hooks import (
    Caller,
    GradientHook,
    find_caller,
    placeholder,
    send_plain,
    sparse_gradient,
    wire_type,
)
from .under_horovod.in_flight import (
    Cast,
    FusedHandle,
    PlainHandle,
    Reducer,
    RoundsHandle,
    begin,
    complete,
    count_ranks,
    require_all_ranks,
    rounds,
)  # fmt: skip
from .under_horovod.memory import OptimizerState, Pending, memory_of

__all__ = [
    "Elastic", "compress", "count_sparse", "load_state_dict", "report", "residuals", "restart",
    "state_dict", "synchronize", "watch",
]  # fmt: skip
_log = logging.getLogger(__name__)


# Number of states kept for plain hvd.allreduce: a program that creates new settings for every call
# would fill memory. All ranks make the same calls, so they evict the same states.
_MOST_CALLS = 64


@torch.compiler.disable
def compress(tensor: torch.Tensor, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """Start the exchange of one gradient; see Compression.compress."""
    wire, ctx = _ask(tensor, find_caller(frame, tensor), settings)
    return (placeholder(tensor) if wire is None else wire), ctx


def _ask(tensor: torch.Tensor, caller: Caller, settings: Settings) -> tuple[Any, Any]:
    """Return what Horovod is to reduce (None if we reduce it), and the context for decompress."""
    if caller.optimizer is None:  # an optimizer always passes its op
        op = hvd.mpi_ops.handle_average_backwards_compatibility(caller.op, caller.average)
        caller = replace(caller, op=op)
    if caller.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{caller.name or 'tensor'}: compression takes op=hvd.Average or hvd.Sum; Adasum, "
            "Min, Max and Product need the dense tensor. Use another op, or no compression."
        )
    if caller.optimizer is None:
        memory = _memory_of_calls(settings, caller.process_set.process_set_id)
    else:
        memory = memory_of(caller.optimizer)
    if caller.optimizer is None and tensor.requires_grad and torch.is_grad_enabled():
        return tensor, None  # a differentiable all-reduce; encoding would detach the graph
    if caller.opens:
        _open(memory, caller, tensor.device)
    if caller.parameter is not None:
        memory.sends(caller.parameter.grad)
    compares = caller.opens and caller.optimizer is not None and memory.engine.sameness.step()
    wire, ctx = _send(tensor, caller, memory)
    if caller.optimizer is not None:
        assert memory.buckets is not None
        filed = ctx if isinstance(ctx, RoundsHandle | FusedHandle) else None
        if filed is not None:
            memory.side.follow(filed.tensor)
        full = memory.buckets.add(str(caller.name), filed)
        if full is not None:
            begin(memory, full, caller.process_set)
        memory.pending.poll()
    return wire, CheckedHandle.begin(memory, caller.optimizer, ctx) if compares else ctx


def _send(tensor: torch.Tensor, caller: Caller, memory: OptimizerState) -> tuple[Any, Any]:
    engine, sets, name = memory.engine, caller.process_set, caller.name
    of_optimizer = caller.optimizer is not None
    kind, flat = wire_type(tensor), tensor.detach().reshape(-1)
    gradient = Gradient(name, tuple(tensor.shape), flat)
    factor = caller.scale * (sets.size() if caller.op == hvd.Sum else 1)
    engine.begin([gradient])
    if memory.nodes.place is not None and tensor.is_floating_point():
        # Its owner alone sorts it, once it has the node's mean; `begin` tracks it on all ranks.
        return None, _filed(gradient, tensor, factor, memory, sets)
    step = engine.sort(
        [gradient], ranks=sets.size(), total=partial(total, memory, sets),
        plain_itemsize=kind.itemsize,
    )  # fmt: skip
    if step.plain:
        chosen = of_optimizer and memory.settings.compresses(gradient.shape)
        # With groups the user fuses explicitly; a tuner must time plain steps as stock Horovod's.
        unfused = not of_optimizer or caller.optimizer._groups is not None or memory.settings.tune
        if gradient.is_float and not (chosen or unfused or memory.uses_placeholders()):
            send, end = partial(send_plain, caller), partial(complete, memory, sets)
            return None, FusedHandle(tensor.detach(), kind, send, end)
        wire = tensor if flat.data_ptr() == tensor.data_ptr() else flat.view(tensor.shape)
        return wire.to(kind), None if kind == tensor.dtype else Cast(tensor.dtype)
    if step.dense:
        if of_optimizer:
            memory.begins([str(name)], dense=True)
        wire = engine.dense_values(gradient, wire=kind).view(tensor.shape)
        return wire, PlainHandle(memory, str(name), factor, tensor.dtype)
    if of_optimizer:
        return None, _filed(gradient, tensor, factor, memory, sets)
    # A compressed hvd.allreduce is a bucket of one tensor, and leaves its input unchanged.
    copied = replace(gradient, values=flat.clone())
    handle = RoundsHandle(copied, tensor.detach(), factor, memory.pending.complete)
    memory.counts_ranks = False
    count_ranks(memory, name, sets)
    require_all_ranks(memory, str(name), sets)
    wire = Reducer(sets, memory.settings.wait_s, memory.side, tensor.device, named=bool(name))
    memory.side.follow(copied.values)
    memory.pending.begin(str(name or id(handle)), rounds(memory, [handle], sets), wire)
    return None, handle


def _filed(
    gradient: Gradient, tensor: torch.Tensor, factor: float, memory: OptimizerState, sets: Any
) -> RoundsHandle:
    assert memory.buckets is not None
    count_ranks(memory, memory.buckets.members[0][0], sets)
    return RoundsHandle(gradient, tensor.detach(), factor, partial(complete, memory, sets))


def _open(memory: OptimizerState, caller: Caller, device: torch.device) -> None:
    """Begin a step, or a call; drop exchanges left by a failed one.

    All ranks agree before the first one, and when the number of ranks has changed.
    """
    sets = caller.process_set
    ranks = sets.size()
    follow_restarts(_memory_of_calls.cache_clear)
    if caller.optimizer is None:
        memory.pending = Pending()  # other calls, and other threads, have their own
    else:
        memory.begin_step()
        _lay_out(memory, caller.optimizer)
        assert memory.watch is not None
        memory.watch.begin_pass()
        if memory.has_broken_rounds:
            end_broken_rounds(memory, sets)
        if caller.optimizer._synchronized:
            agree_on_fresh(memory, sets, fresh=True)
    if memory.engine.agreed != ranks:
        _agree(memory, caller, device)
    if caller.optimizer is not None and memory.nodes.loaded != []:
        tensors = ordered_tensors(caller.optimizer)
        memory.nodes.settle(tensors, ranks=ranks, rank=sets.rank())


def _agree(memory: OptimizerState, caller: Caller, device: torch.device) -> None:
    """Check with all ranks the settings of one call, or of all new optimizers."""
    sets = caller.process_set
    ranks = sets.size()
    memory.engine.traffic.logs = sets.rank() == 0
    if caller.optimizer is None:
        agree_on_calls(memory, sets)
        agreed = [memory]
    else:
        new = agree_on_optimizers(
            memory, caller.optimizer, lambda other: memory_of(other).engine.agreed != ranks
        )
        agreed = list(map(memory_of, new))
        number = agree_on_number(memory, sets)
        for state in agreed:
            state.set_number(number)
            if state.engine.agreed is not None:  # the number of ranks has changed without `restart`
                state.reset()
    if any(state.settings.exchange == "shared" for state in agreed):
        exact = not alike_in_hardware(memory, sets, device)
        for state in agreed:
            state.engine.shared.exact = exact
    if caller.optimizer is not None:
        find_nodes(memory, new, sets)
    for state in agreed:
        state.engine.agreed = ranks


def _again(memory: OptimizerState, caller: Caller) -> bool:
    """Whether the optimizer passes gradients again that are already the ranks' means.

    `step()` does so after `synchronize()`, unless inside `skip_synchronize()`. The mean may have
    been clipped or unscaled since; treated as a gradient, the residual would be added twice.
    """
    optimizer = caller.optimizer
    if caller.opens:
        passes = optimizer.backward_passes_per_step
        memory.repeats = optimizer._synchronized and all(
            # A backward pass counts this down before Horovod passes the gradient.
            optimizer._allreduce_delay[parameter] == passes and memory.has_sent(parameter.grad)
            for parameter in optimizer._requires_update
        )
        if memory.repeats:
            agree_on_fresh(memory, caller.process_set, fresh=False)
    return memory.repeats


def _lay_out(memory: OptimizerState, optimizer: Any) -> None:
    """Create the buckets, or check that they still cover all parameters that Horovod reduces."""
    reduced, names = optimizer._requires_update, optimizer._parameter_names
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in trained:
        if parameter not in reduced:
            what = names.get(parameter, "a parameter without a name")
            raise CompressError(
                f"{what} of shape {tuple(parameter.shape)} is trained, but Horovod does not reduce "
                "it: it was added, or set to require gradients, after DistributedOptimizer was "
                "created. Create it again, with all parameters."
            )
    for parameter in reduced:
        memory.outcomes.follow(names[parameter], parameter)
    if memory.buckets is None:
        # Gradients usually arrive in the reverse of this order.
        ordered = reversed(reduced_parameters(optimizer))
        memory.buckets = Buckets((names[p], p.numel(), p.device) for p in ordered)
    if memory.watch is None:
        named = [(p, names[p]) for p in reduced]
        memory.watch = CallWatch(0, lambda: named, None)
        memory.watch.begin_step(optimizer)  # if this is inside a step, its beginning was missed
    if memory.submission is None:
        ask, again = partial(_ask, settings=memory.settings), partial(_again, memory)
        memory.submission = GradientHook(
            optimizer, memory.uses_placeholders, ask, again, memory.settings.wait_s
        )
    memory.submission.begin()


@lru_cache(maxsize=_MOST_CALLS)
def _memory_of_calls(settings: Settings, process_set: int) -> OptimizerState:
    if _memory_of_calls.cache_info().currsize == _MOST_CALLS:
        _say_dropped_once()
    return OptimizerState(settings, of_call=True)


def count_sparse(frame: FrameType) -> None:
    """Count what this rank sent for a sparse gradient, which Horovod gathers uncompressed."""
    optimizer, parameter = sparse_gradient(frame)
    gradient = parameter.grad
    parts = gradient._indices(), gradient._values()
    nbytes = sum(part.numel() * part.element_size() for part in parts)
    traffic = memory_of(optimizer).engine.traffic
    traffic.sparse(optimizer._parameter_names[parameter], gradient._values().numel(), nbytes)


@cache
def _say_dropped_once() -> None:
    _log.warning(
        "hvd.allreduce was called with compressions of more than %d settings; the least recently "
        "used state was evicted. Make one with using(...) and keep it.",
        _MOST_CALLS,
    )


def report(optimizer: Any) -> dict[str, float]:
    """See Compression.report."""
    memory = memory_of(optimizer)
    report, place = memory.engine.report(), memory.nodes.place
    return report if place is None else report | place.report(memory.engine.traffic.steps)


def watch(optimizer: Any, scaler: Any) -> None:
    """See Compression.watch."""
    memory_of(optimizer).engine.watch(scaler)
