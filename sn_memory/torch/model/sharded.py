"""Models with parameters split over several ranks: modules under FSDP2, tensors on a device mesh.

A step run only for measurement gathers, frees and reduces like any other, so it must restore the
state of FSDP2, even in the middle of a forward pass; and all ranks must decide the same, or one
waits for a collective that another never calls. The private names of FSDP2 used here are those of
torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import TraceError

# The tensors that a sparse tensor consists of, by layout.
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
# Looked up in sys.modules: whoever shards has imported it, and nobody else needs
# torch.distributed.
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_FIRST = "FullyShardedDataParallel"
# The attribute FSDP1 sets on a flat parameter, of which the module's parameters may be views.
_FLAT = "_is_flat_param"


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor consists of on this rank; a plain one yields itself."""
    if tensor.layout in _SPARSE:
        yield from (getattr(tensor, name)() for name in _SPARSE[tensor.layout])
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        # The names of a DTensor's parts include its mesh.
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from pieces(part)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor on this rank: the local tensor of a DTensor.

    A sparse tensor is returned dense, for comparison.
    """
    if tensor.layout in _SPARSE:
        return tensor.to_dense()
    held = list(pieces(tensor))
    return held[0] if len(held) == 1 else tensor


def is_elsewhere(parameter: torch.Tensor) -> bool:
    """Whether a parameter is split over several ranks, or is a view of a flat one that is."""
    return is_traceable_wrapper_subclass(parameter) or parameter._base is not None


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 manages parameters of the model, gathering them before ops and freeing them."""
    return bool(_states(model))


def of_first_fsdp(model: torch.nn.Module) -> bool:
    """Whether FSDP1 manages parameters of the model: it wraps modules and flattens parameters."""
    return any(
        type(module).__name__ == _FIRST
        or any(
            hasattr(param, _FLAT) or hasattr(param._base, _FLAT)
            for param in module.parameters(False)
        )
        for module in model.modules()
    )


def first_fsdp_refused() -> TraceError:
    """Return the error for a model wrapped by FSDP1."""
    return TraceError(
        "the model is wrapped by FullyShardedDataParallel, torch's first FSDP, which replaces its "
        "parameters by flat ones. Shard it by torch.distributed.fsdp.fully_shard, after planning "
        "or before."
    )


def register_fsdp_alias(twin: torch.nn.Module, model: torch.nn.Module) -> None:
    """Register the FSDP2 state of a model for a twin that shares all its attributes."""
    module = sys.modules.get(_STATE)
    state = module and module._get_module_fsdp_state(model)
    if module and state is not None and module._get_module_state(twin) is None:
        module._insert_module_state(twin, state)


def most(model: torch.nn.Module, values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over the ranks that share the model's parameters.

    If no parameter is split over ranks, returns the values as they are. A collective: each rank
    calls it at the same point.
    """
    # A dict, as a set is unordered, and all ranks have to visit the meshes in the same order.
    meshes: dict[Any, None] = {}
    for tensor in (*model.parameters(), *_managed_parameters(model)):
        if is_traceable_wrapper_subclass(tensor) and hasattr(tensor, "device_mesh"):
            meshes.setdefault(tensor.device_mesh)
    # One mesh after the other: the maximum over one mesh is the input of the next.
    for mesh in meshes:
        held = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX, group=group)
        values = held.tolist()
    return list(values)


def somewhere(model: torch.nn.Module, flag: bool) -> bool:
    """Whether the flag is set on any rank that shares the model's parameters; see `most`."""
    return bool(most(model, [float(flag)])[0])


@contextmanager
def shards_put_back(model: torch.nn.Module) -> Iterator[set[int]]:
    """Restore FSDP2's state of the model's modules; inside, its states are idle.

    Yields the ids of the parameters it manages. These need no stand-ins: gradients reach its own
    copies, and the hooks on the user's parameters, which it calls, are removed meanwhile.
    """
    states = _states(model)
    groups = [group for state in states for group in state._fsdp_param_groups]
    # Comes first, as it creates the contexts that are read below.
    before = _initialize(states)
    for group in groups:
        if group._all_gather_result is not None:  # prefetched
            group.wait_for_unshard()
    # Save all that a step changes: fields, containers, gathered parameters, gradients.
    contexts = list({id(state._state_ctx): state._state_ctx for state in states}.values())
    shared = list({id(state._comm_ctx): state._comm_ctx for state in states}.values())
    before += _fields(states, "_training_state")
    before += _fields(groups, "_training_state", "_partial_reduce_output")
    before += _fields(contexts, "iter_forward_root", "post_backward_final_callback_queued")
    lists = [state.post_forward_order for state in shared]
    lists += [group._post_forward_indices for group in groups]
    orders = [(order, list(order)) for order in lists]
    pending = [
        (state._modules_to_run_forward, set(state._modules_to_run_forward)) for state in states
    ]
    gathered = [group.is_unsharded for group in groups]
    owned = [param for group in groups for param in group.fsdp_params]
    before += _fields(owned, "unsharded_accumulated_grad")
    known = _managed_parameters(model)
    before += _fields(known, "grad", "_post_accumulate_grad_hooks")
    for param in known:
        param._post_accumulate_grad_hooks = None
    _set_idle(states, groups, contexts)
    for container in (*lists, *(forward for forward, _ in pending)):
        container.clear()
    try:
        yield {id(param) for param in known}
    finally:
        # While the states are idle: in a forward pass FSDP2 gathers and frees differently.
        for group, full in zip(groups, gathered, strict=True):
            if full and not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()
            elif group.is_unsharded and not full:
                group.reshard()
        for holder, name, value in before:
            setattr(holder, name, value)
        for order, items in orders:
            order[:] = items
        for waiting, modules in pending:
            waiting.clear()
            waiting.update(modules)


def _fields(holders: Iterable[Any], *names: str) -> list[tuple[Any, str, Any]]:
    """Return the current values of some attributes; missing ones are left out."""
    return [
        (holder, name, getattr(holder, name))
        for holder in holders
        for name in names
        if hasattr(holder, name)
    ]


def _initialize(states: list[Any]) -> list[tuple[Any, str, Any]]:
    """Initialize states that have not run yet, the outermost as roots; return the previous fields.

    These are restored later, as a sharded module around the model has to become the root.
    """
    new = [state for state in states if state._is_root is None]
    groups = [group for state in new for group in state._fsdp_param_groups]
    before = _fields(new, "_is_root", "_state_ctx", "_comm_ctx")
    before += _fields(groups, "comm_ctx", "post_forward_mesh_info", "_module_fqn")
    for fresh in new:
        fresh._state_ctx, fresh._comm_ctx = type(fresh._state_ctx)(), type(fresh._comm_ctx)()
    for fresh in new:  # modules come before those inside them, so the outermost become roots
        fresh._lazy_init()
    return before


def _set_idle(states: Any, groups: Any, contexts: Any) -> None:
    """Reset FSDP2 to the start of a step, though an outer forward pass may be under way."""
    for holder in (*states, *groups):
        holder._training_state = type(holder._training_state).IDLE
    for group in groups:
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
    for context in contexts:
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False


def _states(model: torch.nn.Module) -> list[Any]:
    """Return FSDP2's states of the model's modules, and of all modules under the same root."""
    composable = sys.modules.get(_STATE)
    if composable is None:
        return []
    own = [composable._get_module_fsdp_state(module) for module in model.modules()]
    around = [
        state
        for context in own
        if context is not None
        for state in (context, *context._state_ctx.all_states)
    ]
    return list({id(value): value for value in around}.values())


def _managed_parameters(model: torch.nn.Module) -> list[Any]:
    """Return the parameters of FSDP2's groups: the shards, and the whole ones if gathered."""
    params = []
    for state in _states(model):
        for group in state._fsdp_param_groups:
            for param in group.fsdp_params:
                params.append(param.sharded_param)
                with suppress(AttributeError):  # not gathered yet
                    params.append(param._unsharded_param)
    return params
