"""The DDP model that a state's hook is on: its group, its parameters, how it divides.

register_comm_hook tells the state nothing, and a bucket knows no model. So the model is looked for,
once, when the hook is called first: it is alive, as it calls.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...base.errors import CompressError


class HookedModel:
    """Of one state; empty where another caller than DDP calls the hook, or before it does."""

    def __init__(self) -> None:
        self._model: weakref.ref[DistributedDataParallel] | None = None

    def find(self, state: Any, group: Any) -> Any:
        """Look for the model; the process group that the state takes: its own, or the model's.

        Raises CompressError for a group of other ranks than the model's.
        """
        for model in _models_of(state):
            self._model = weakref.ref(model)
            theirs = model.process_group
            group = theirs if group is None else group
            if (own := _ranks(group)) != (ddp := _ranks(theirs)):
                raise CompressError(
                    f"CompressionState has the process_group of ranks {own}, and its hook is on a "
                    f"DistributedDataParallel of ranks {ddp}; expected the same. Leave "
                    "process_group out, or pass process_group=ddp.process_group."
                )
        return group

    def check_join(self) -> None:
        """Raise CompressError in a Join that divides by fewer ranks than there are."""
        model = None if self._model is None else self._model()
        if model is None or not model._join_config.enable:
            return
        if not getattr(model, "_divide_by_initial_world_size", True):
            raise CompressError(
                "Join got divide_by_initial_world_size=False, and a hook is not told how many "
                "ranks have not joined; expected True, where all ranks count, those that have "
                "joined with zeros. Leave it out, or train without this hook."
            )

    @property
    def static(self) -> bool:
        """Whether its graph was said to be static."""
        model = None if self._model is None else self._model()
        return model is not None and bool(model.static_graph)

    def trained(self) -> list[tuple[torch.Tensor, str]] | None:
        """Parameters that require gradients now, those that DDP ignores left out; None: unknown."""
        model = None if self._model is None else self._model()
        if model is None:
            return None
        return [
            (parameter, name)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]


def _models_of(state: Any) -> list[DistributedDataParallel]:
    # By its type: to ask some objects for their class makes them import things.
    models = [it for it in gc.get_objects() if issubclass(type(it), DistributedDataParallel)]
    return [it for it in models if any(own is state for _, own in vars(it).get("_comm_hooks", ()))]


def _ranks(group: Any) -> list[int]:
    return sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
