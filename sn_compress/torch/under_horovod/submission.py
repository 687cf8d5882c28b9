"""How Horovod's optimizer submits a gradient once it has had a step of ours: without a stand-in.

Stock Horovod wants a handle of a collective for each parameter, so in the first step a zero stands
in for a gradient that travels in a bucket. A handle may also be a function, as that of a sparse
gradient is. So from the second step on nothing travels but the bucket, and what is waited for is
waited for asleep: hvd.synchronize asks again and again, and holds up the ranks it waits for where
they share its cores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from ...base._waiting import result_of
from .caller import Arrival, Caller, caller_of


class Submission:
    """Stands in an optimizer in the place of its `_allreduce_grad_async`.

    optimizer : made by hvd.DistributedOptimizer, held weakly
    stands_in : whether all ranks hand Horovod stand-ins in this step
    send : what is to be handed to Horovod for a tensor, or None where it travels in a bucket, and
        what is to be done with the result
    again : whether what a tensor holds is the ranks' mean already, on all ranks alike
    limit_s : seconds to wait for other ranks
    """

    def __init__(
        self,
        optimizer: Any,
        stands_in: Callable[[], bool],
        send: Callable[[torch.Tensor, Caller], tuple[Any, Any]],
        again: Callable[[Caller], bool],
        limit_s: float,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stands_in, self._send, self._again = stands_in, send, again
        self._limit_s = limit_s

    def begin(self) -> None:
        """From the next gradient on."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._allreduce_grad_async = self

    def end(self) -> None:
        """From the next gradient on Horovod submits itself."""
        if (optimizer := self._optimizer()) is not None:
            vars(optimizer).pop("_allreduce_grad_async", None)

    def __call__(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Called by Horovod for each gradient, in the backward pass or behind it."""
        optimizer = self._optimizer()
        assert optimizer is not None  # who calls is its method
        if parameter.grad is None:  # not used in this step, but by another rank, perhaps
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        caller = caller_of(optimizer, parameter)
        again = self._again(caller)
        if gradient.is_sparse:
            if not optimizer.sparse_as_dense:
                return type(optimizer)._allreduce_grad_async(optimizer, parameter)  # type: ignore[no-any-return]
            gradient = gradient.to_dense()
        if again:
            return Arrival(lambda: gradient), None
        wire, ctx = self._send(gradient, caller)
        if wire is None and not self._stands_in():
            return Arrival(partial(ctx.finish, gradient)), None
        if wire is None:
            wire = stand_in(gradient)
        what, limit_s = str(caller.name), self._limit_s
        handle = send_plain(caller, wire, what)
        return Arrival(partial(result_of, hvd, handle, limit_s=limit_s, what=what)), ctx


def send_plain(caller: Caller, wire: torch.Tensor, name: str) -> int:
    """Start the all-reduce that Horovod's optimizer starts for a gradient of its own; its handle.

    wire : which becomes the result
    """
    # Split as Horovod splits it; it divides by the number of ranks itself.
    average = caller.op == hvd.Average
    divisor = caller.optimizer.gradient_predivide_factor if average else 1.0
    return hvd.allreduce_async_(  # type: ignore[no-any-return]
        wire, name=name, op=caller.op, prescale_factor=1.0 / divisor, postscale_factor=divisor,
        process_set=caller.process_set,
    )  # fmt: skip


def stand_in(gradient: torch.Tensor) -> torch.Tensor:
    """The zero that Horovod reduces in the place of a gradient that travels in a bucket."""
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    return torch.zeros(1, dtype=wire_type(gradient), device=gradient.device)


def wire_type(gradient: torch.Tensor) -> torch.dtype:
    """What a gradient travels as that goes through Horovod's own all-reduce."""
    # It reduces no bfloat16; what half precision takes of a dense step is sent later.
    return torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
