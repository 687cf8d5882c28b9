"""Compressed averaging over the replicas of torch's FSDP2 with hybrid sharding (HSDP).

    state = compress_replicas(model, LowRankCompression.using(ratio=50), mesh["replicate"])

FSDP2 passes its all-reduce hook one flat tensor per module: the reduce-scattered shards of the
parameters that have a gradient, concatenated, each padded with zeros to the longest shard of any
rank. As a single vector that has no low rank, and biases would be compressed along with kernels. So
each shard is sliced out, without its padding, as a separate tensor: the shard of a matrix is some
of its rows, so a matrix again.

The hook is not told which parameters have a gradient. If the total length matches, all have one;
otherwise hooks on the parameters tell, and the result is checked against the length.

Everything else, including the state, is that of the DDP hook. FSDP2 keeps the shards' sizes in
private attributes, which only `_Shards` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..compression import Compression
from ..errors import CompressError
from .ddp import CompressionState
from .layout import BucketSlice
from .outcomes import Outcomes


def compress_replicas(
    model: nn.Module,
    compression: type[Compression],
    replicas: dist.ProcessGroup | DeviceMesh,
    *,
    scaler: Any = None,
) -> CompressionState:
    """Average the gradients of all FSDP2 modules in `model` over the replicas, compressed.

    model : after fully_shard, over one dimension of the mesh
    compression : a compression class such as LowRankCompression, bare or from `using`
    replicas : mesh["replicate"], or the process group of the ranks with the same shards as this one
    scaler : as in CompressionState
    Returns the state, for `report`, `state_dict` and `load_state_dict`, with the names of
    model.named_parameters() and the shapes of this rank's shards.

    Raises CompressError for a model without FSDP2 modules, one that torch all-reduces itself (a
    two-dimensional mesh) or that already has a hook, and for ranks that are not replicas.
    """
    if not isinstance(model, nn.Module):
        raise CompressError(
            f"compress_replicas got a {type(model).__qualname__} as model; expected a module after "
            "fully_shard. Call compress_replicas(model, compression, replicas)."
        )
    replica_group = _group_of(replicas)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Modules sharded together share a group; a module has none if all its parameters are in others.
    groups = {id(group): (module, group) for module in modules if (group := param_group(module))}
    if not groups:
        raise CompressError(
            f"compress_replicas got a {type(model).__qualname__} without a module of FSDP2; "
            "expected one after fully_shard. Call fully_shard(model, mesh=mesh['shard']) first."
        )
    names = {
        (id(module), name): f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    hooked = [(module, _Shards(group, names)) for module, group in groups.values()]
    for _, shards in hooked:
        shards.check(replica_group)
    named = [pair for _, shards in hooked for pair in shards.named()]
    state = CompressionState(compression, replica_group, named_parameters=named, scaler=scaler)
    for module, shards in hooked:
        shards.watch()
        module.set_all_reduce_hook(_hook(state, shards))
    # If FSDP2 does not call the all-reduce hook, the hook itself cannot notice.
    model.register_forward_pre_hook(_check_before_pass)
    return state


def _check_before_pass(model: nn.Module, _: Any) -> None:
    """Raise CompressError if FSDP2 would silently let the replicas drift apart."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            if module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
                raise CompressError(
                    "the last backward pass did not finish, and FSDP2 averages nothing until it is "
                    "reset; expected reset_iter_state() after an exception. Call it on the module "
                    "that was sharded last, the root, and take the step again."
                )
            group = param_group(module)
            if group is not None and group._all_reduce_hook is None:
                raise CompressError(
                    f"the module {name!r} was sharded after compress_replicas, so nothing averages "
                    "it over the replicas; expected all of them before. Call compress_replicas "
                    "after the last fully_shard."
                )


def _hook(state: CompressionState, shards: _Shards) -> Callable[[torch.Tensor], None]:
    @torch.no_grad()
    def average(flat: torch.Tensor) -> None:
        parts = shards.parts(flat)
        shards.follow(state.outcomes)
        # If all shards of a rank are empty, so are those of its replicas.
        if shards.accumulate(flat, parts) and parts:
            for _ in state.rounds([(flat, parts)]):
                pass

    return average


class _Shards:
    """The shards on this rank of the parameters of one FSDP2 module."""

    def __init__(self, group: Any, names: dict[tuple[int, str], str]) -> None:
        self._group = group
        owners = [param._module_info for param in group.fsdp_params]
        self._names = [names[id(owner.module), owner.param_name] for owner in owners]
        # Elements in the flat tensor: the size of the longest shard of any rank.
        self._padded = [param.padded_sharded_param_size.numel() for param in group.fsdp_params]
        self._used: set[int] = set()  # with a gradient since the last reduction
        self._watched: dict[int, torch.Tensor] = {}
        self._waiting: dict[str, torch.Tensor] = {}  # reduce-scattered and not yet averaged

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return each name with a meta tensor of the shard's shape and dtype."""
        params = self._group.fsdp_params
        return [
            (name, torch.empty(param.sharded_size, dtype=param.sharded_param.dtype, device="meta"))
            for name, param in zip(self._names, params, strict=True)
        ]

    def check(self, replicas: dist.ProcessGroup | None) -> None:
        """Raise CompressError unless torch leaves averaging over these replicas to a hook."""
        group = self._group
        # With a two-dimensional mesh FSDP2 calls the hook after its own all-reduce.
        if getattr(group.mesh_info, "replicate_mesh_size", 1) > 1:
            raise CompressError(
                "fully_shard got a mesh with replicas, over which it averages itself; expected one "
                "dimension. Call fully_shard(module, mesh=mesh['shard'])."
            )
        if group._all_reduce_hook is not None:
            raise CompressError(
                f"the module of {self._names[0]!r} has an all-reduce hook already; expected none. "
                "Call compress_replicas once."
            )
        replica_ranks = set(dist.get_process_group_ranks(replicas))
        shard_ranks = set(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
        if both := sorted((replica_ranks & shard_ranks) - {dist.get_rank()}):
            raise CompressError(
                f"ranks {both} are in `replicas` and hold other shards of {self._names[0]!r}; "
                "expected ranks with the same shards. Pass the dimension of the mesh that "
                "fully_shard did not get: mesh['replicate']."
            )

    def watch(self) -> None:
        """Start tracking which parameters get gradients; they exist from the first forward on."""
        for module in self._group.modules:
            module.register_forward_pre_hook(self._watch)

    def _watch(self, *_: Any) -> None:
        for place, param in enumerate(self._group.fsdp_params):
            full = getattr(param, "_unsharded_param", None)
            if full is not None and full.requires_grad and self._watched.get(place) is not full:
                full.register_post_accumulate_grad_hook(partial(self._use, place))
                self._watched[place] = full

    def _use(self, place: int, _: torch.Tensor) -> None:
        self._used.add(place)

    def parts(self, flat: torch.Tensor) -> list[BucketSlice]:
        """Return the slices of the non-empty shards in a flat tensor."""
        used, all_places = sorted(self._used), list(range(len(self._padded)))
        self._used.clear()
        places = all_places if sum(self._padded) == flat.numel() else used
        if sum(self._padded[place] for place in places) != flat.numel():
            raise CompressError(
                f"FSDP2 averages {flat.numel()} elements of {self._names}; expected "
                f"{sum(self._padded)}, or fewer where parameters have no gradient, of which "
                f"{[self._names[place] for place in used]} were seen to have one. Call the module, "
                "not a method of it, or set_reduce_scatter_unused_params(True)."
            )
        slices, start = [], 0
        for place in places:
            shape = tuple(self._group.fsdp_params[place].sharded_size)
            part = BucketSlice(self._names[place], start, shape)
            slices += [part] if part.elements else []
            start += self._padded[place]
        return slices

    def follow(self, outcomes: Outcomes) -> None:
        """Before a pass's first exchange, check the outcomes of the last pass's gradients.

        This is early enough, as FSDP2 adds to the shards' gradients only after the exchange.
        """
        for name, param in zip(self._names, self._group.fsdp_params, strict=True):
            outcomes.follow(name, param.sharded_param)
        outcomes.reached()

    def accumulate(self, flat: torch.Tensor, parts: list[BucketSlice]) -> bool:
        """Add gradients deferred by earlier passes; return whether to average now.

        With set_requires_all_reduce(False) gradients are deferred to a later pass. FSDP2 adds what
        it gets back to `.grad`, so until then it gets zeros.
        """
        for part in parts:
            if part.name in self._waiting:
                part.of(flat).add_(self._waiting.pop(part.name))
        # FSDP2 checks this only for its own all-reduce, and calls the hook in any case.
        if self._group.all_reduce_grads:
            return True
        self._waiting.update((part.name, part.of(flat).clone()) for part in parts)
        flat.zero_()
        return False


def param_group(module: FSDPModule) -> Any:
    """Return FSDP2's record of a module's own parameters; None if it has none."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 has one, or none
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    if len(groups) > 1:
        raise CompressError(
            f"a module of FSDP2 has {len(groups)} meshes; expected one. Give fully_shard one mesh."
        )
    return groups[0] if groups else None


def _group_of(replicas: Any) -> dist.ProcessGroup:
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        return replicas.get_group()
    if isinstance(replicas, dist.ProcessGroup):
        return replicas
    got = f"a {type(replicas).__qualname__}"
    if isinstance(replicas, DeviceMesh):
        got = f"a mesh of {replicas.ndim} dimensions"
    raise CompressError(
        f"compress_replicas got {got} as replicas; expected a mesh of one dimension or a process "
        "group. Pass mesh['replicate']."
    )
