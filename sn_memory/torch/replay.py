"""One autograd node for the whole model: its forward and its backward are a plan's instructions.

Its inputs are the parameters themselves, so their gradients are accumulated, and hooks on them
(DistributedDataParallel, Horovod) fire, as ever; all of them when the node has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_unflatten

from .capture import Captured
from .errors import ReplayError
from .instructions import Memory
from .neutral import main_device
from .program import Program
from .recorder import View


class Replay:
    """Runs a program on the tensors of a model.

    Parameters
    ----------
    captured
        The traced step.
    program
        Its plan.
    """

    def __init__(self, captured: Captured, program: Program) -> None:
        self.captured, self.program = captured, program
        self.device = main_device(captured)
        # Per output that is a tensor, whether a gradient comes back for it.
        self.differentiable = [
            again
            for again, out in zip(captured.differentiable, captured.outputs, strict=True)
            if isinstance(out, View)
        ]
        self._given = [view for _, view in (*captured.parameters, *captured.buffers)]
        self._given += [view for view in captured.inputs if view is not None]

    def __call__(self, given: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Any:
        """Run the forward pass.

        Parameters
        ----------
        given
            Parameters, buffers and flat input tensors, in the order of the capture.
        wanted
            Those of them that require gradients, in the order of its gradients.

        Returns
        -------
        What the model returns.
        """
        results = iter(_Planned.apply(self, given, *wanted))
        flat = [next(results) if isinstance(out, View) else out for out in self.captured.outputs]
        return tree_unflatten(flat, self.captured.output_spec)

    def start(self, given: Sequence[torch.Tensor]) -> Memory:
        """Return memory with what is given in its place."""
        memory = self.program.memory()
        for view, tensor in zip(self._given, given, strict=True):
            place = self.captured.recording.device[view.storage]
            if not view.shows(tensor) or tensor.device != place:
                raise ReplayError(
                    f"a parameter, buffer or input has size {tuple(tensor.size())}, stride "
                    f"{tensor.stride()}, type {tensor.dtype} and device {tensor.device}; planned "
                    f"were {view.size}, {view.stride}, {view.dtype} and {place}. Plan the model as "
                    "it is now."
                )
            if view == self.program.forms[view.storage]:
                memory.held[view.storage] = tensor
        for storage, tensor in self.captured.recording.constants.items():
            memory.held[storage] = tensor
        return memory


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replay: Replay, given: Any, *wanted: torch.Tensor) -> Any:
        memory = replay.start(given)
        with _as_recorded(replay.device):
            for instruction in replay.program.forward:
                instruction(memory)
            # Another tensor on the same storage: what is held here must not hold this node.
            results = tuple(take(memory.held).detach() for take in replay.program.results)
        ctx.mark_non_differentiable(
            *(it for it, again in zip(results, replay.differentiable, strict=True) if not again)
        )
        ctx.replay, ctx.memory = replay, memory
        ctx.versions = _versions(replay.program, memory)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        replay, memory = ctx.replay, ctx.memory
        if memory.spent:
            raise ReplayError(
                "backward runs a second time through a planned model, whose storages are gone. Run "
                "the model again, or sum the losses and call backward once."
            )
        if _versions(replay.program, memory) != ctx.versions:
            raise ReplayError(
                "a parameter, buffer, input or output that the backward pass needs was changed in "
                "place since the forward pass. Change it after backward."
            )
        captured = replay.captured
        arrived = [it for it, again in zip(incoming, replay.differentiable, strict=True) if again]
        try:
            with _as_recorded(replay.device):
                for view, tangent in zip(captured.tangents, arrived, strict=True):
                    memory.held[view.storage] = _as_planned(view, tangent)
                for instruction in replay.program.backward:
                    instruction(memory)
                gradients = [
                    None if take is None else take(memory.held) for take in replay.program.gradients
                ]
        finally:
            replay.program.end(memory)
        return None, None, *gradients


def _versions(program: Program, memory: Memory) -> list[int]:
    held = [memory.held[storage] for storage in program.read_later]
    return [tensor._version for tensor in held if tensor is not None]


def _as_planned(view: View, tangent: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the layout that was traced; `sum` hands over one number, expanded."""
    if view.shows(tangent):
        return tangent
    return torch.empty_strided(
        view.size, view.stride, dtype=view.dtype, device=tangent.device
    ).copy_(tangent)


def _as_recorded(device: torch.device) -> Any:
    """Casts of autocast are among the recorded calls; they must not be cast again."""
    return torch.autocast(device.type, enabled=False)
