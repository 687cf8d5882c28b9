"""The caller of `compress` (parameter, optimizer, operation), and the handles Horovod waits for.

Horovod passes only the tensor. Keying by the order of calls would break as soon as two ranks
compute gradients in different orders, and keying by address as soon as gradients are freed, so the
caller is read from the local variables of Horovod's own calling function. They are those of release
0.28.1, which `scripts/build_horovod.py` builds; anything else is an error (decision 9).

Stock Horovod needs a handle of a collective for each parameter, so in the first step a placeholder
(a zero) is reduced for each gradient in a bucket. A handle may also be a function, as for sparse
gradients. So from the second step on `GradientHook` replaces the method that submits gradients:
nothing is sent but the bucket, and waiting sleeps. hvd.synchronize busy-polls, which slows down the
ranks it waits for if they share its cores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import horovod.torch as hvd
import torch

from ...consistency import result_of
from ...errors import CompressError

_DEEPEST = 6  # max. frames between Horovod's function and `compress`: subclasses, comprehensions


@dataclass(frozen=True)
class Caller:
    """What Horovod's calling function tells about a gradient.

    name : None for an unnamed hvd.allreduce
    optimizer, parameter : None for any hvd.allreduce
    opens : whether it is the first of its step or call
    """

    name: str | None
    optimizer: Any
    op: Any
    process_set: Any
    scale: float = 1.0  # pre- and postscale factors of hvd.allreduce
    average: bool | None = None  # deprecated alternative to `op`
    opens: bool = True
    parameter: Any = None


class CallableHandle(partial[Any]):
    """Horovod keeps this as the handle of one of our gradients, and calls it for the result."""

    @torch.compiler.disable  # an exchange cannot be traced, if optimizer.step is compiled
    def __call__(self) -> Any:
        return super().__call__()


def find_caller(frame: FrameType | None, tensor: Any) -> Caller:
    """Read the caller from the frames above `compress`; CompressError if it is not Horovod."""
    for function, local in _callers(frame):
        if reader := _READERS.get(function):
            return reader(local, tensor)
    raise CompressError(
        "compress of a compression was not called by Horovod 0.28.1; expected it as compression= "
        "of hvd.DistributedOptimizer or hvd.allreduce. To encode a vector use FFTCodec."
    )


def _callers(frame: FrameType | None) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield module and name, and the local variables, of each function above `compress`."""
    for _ in range(_DEEPEST):
        if frame is None:
            return
        yield (frame.f_globals.get("__name__", ""), frame.f_code.co_name), frame.f_locals
        frame = frame.f_back


def _gradient(local: dict[str, Any], tensor: Any) -> Caller:
    return caller_of(local["self"], local["p"])


def _grouped_gradient(local: dict[str, Any], tensor: Any) -> Caller:
    parameter = next(p for p in local["ps"] if p.grad is tensor)
    return caller_of(local["self"], parameter, first=parameter is local["ps"][0])


def caller_of(optimizer: Any, parameter: Any, *, first: bool = True) -> Caller:
    """Return the caller for an optimizer's gradient; first : whether it is the call's first."""
    name = optimizer._parameter_names.get(parameter)
    if hasattr(optimizer, "_starting_models"):  # only the Adasum optimizer has it
        raise CompressError(
            f"{name}: compression cannot be used with op=hvd.Adasum, which takes dot products "
            "of dense tensors. Use op=hvd.Average, or Compression.none with Adasum."
        )
    # With gradient accumulation, gradients of earlier passes have None as a handle. A function that
    # is not ours belongs to a sparse gradient, for which `compress` is not called.
    opens = first and not any(
        handle is not None and (isinstance(handle, CallableHandle) or not callable(handle))
        for handle, _ in optimizer._handles.values()
    )
    return Caller(
        name, optimizer, optimizer.op, optimizer.process_set, opens=opens, parameter=parameter
    )


def _allreduce(local: dict[str, Any], tensor: Any) -> Caller:
    return _of_call(local, local["name"])


def _grouped_allreduce(local: dict[str, Any], tensor: Any) -> Caller:
    index = next(i for i, member in enumerate(local["tensors"]) if member is tensor)
    return _of_call(local, local["name"] and f"{local['name']}.{index}", first=not index)


def _of_call(local: dict[str, Any], name: str | None, *, first: bool = True) -> Caller:
    scale = local["prescale_factor"] * local["postscale_factor"]
    return Caller(name, None, local["op"], local["process_set"], scale, local["average"], first)


def sparse_gradient(frame: FrameType | None) -> tuple[Any, Any]:
    """Return the optimizer and the parameter whose sparse gradient Horovod has gathered."""
    for function, local in _callers(frame):
        if function == ("horovod.torch.optimizer", "synchronize"):
            return local["self"], local["p"]
    raise CompressError(
        "a sparse tensor was not handed to decompress of a compression by Horovod 0.28.1; expected "
        "it as compression= of hvd.DistributedOptimizer"
    )


def _refuse_reducescatter(local: dict[str, Any], tensor: Any) -> Caller:
    raise CompressError(
        "compression cannot be used with reducescatter, which cuts the payload in pieces. "
        "Use Compression.none or Compression.fp16 there."
    )


_READERS = {
    ("horovod.torch.optimizer", "_allreduce_grad_async"): _gradient,
    ("horovod.torch.optimizer", "_grouped_allreduce_grad_async"): _grouped_gradient,
    ("horovod.torch.mpi_ops", "allreduce"): _allreduce,
    ("horovod.torch.mpi_ops", "grouped_allreduce"): _grouped_allreduce,
    ("horovod.torch.mpi_ops", "reducescatter"): _refuse_reducescatter,
    ("horovod.torch.mpi_ops", "grouped_reducescatter"): _refuse_reducescatter,
}


class GradientHook:
    """Replaces an optimizer's `_allreduce_grad_async`.

    optimizer : created by hvd.DistributedOptimizer, held weakly
    uses_placeholders : whether all ranks pass placeholders to Horovod in this step
    send : returns what to pass to Horovod for a tensor (None if it travels in a bucket) and the
        context that finishes its result
    again : whether a tensor already contains the ranks' mean, the same on all ranks
    limit_s : seconds to wait for other ranks
    """

    def __init__(
        self,
        optimizer: Any,
        uses_placeholders: Callable[[], bool],
        send: Callable[[torch.Tensor, Caller], tuple[Any, Any]],
        again: Callable[[Caller], bool],
        limit_s: float,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._uses_placeholders, self._send, self._again = uses_placeholders, send, again
        self._limit_s = limit_s

    def begin(self) -> None:
        """Install the hook, from the next gradient on."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._allreduce_grad_async = self

    def end(self) -> None:
        """Remove the hook: Horovod submits the next gradient itself."""
        if (optimizer := self._optimizer()) is not None:
            vars(optimizer).pop("_allreduce_grad_async", None)

    @torch.compiler.disable
    def __call__(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Send a gradient; Horovod calls this for each, in the backward pass or after it."""
        optimizer = self._optimizer()
        assert optimizer is not None  # one of its methods is the caller
        if parameter.grad is None:  # not used here in this step, but perhaps by another rank
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        caller = caller_of(optimizer, parameter)
        again = self._again(caller)
        if gradient.is_sparse:
            if not optimizer.sparse_as_dense:
                return type(optimizer)._allreduce_grad_async(optimizer, parameter)  # type: ignore[no-any-return]
            gradient = gradient.to_dense()
        if again:
            return CallableHandle(lambda: gradient), None
        wire, ctx = self._send(gradient, caller)
        if wire is None and not self._uses_placeholders():
            return CallableHandle(ctx.finish, gradient), None
        if wire is None:
            wire = placeholder(gradient)
        what, limit_s = str(caller.name), self._limit_s
        handle = send_plain(caller, wire, what)
        return CallableHandle(result_of, hvd, handle, limit_s=limit_s, what=what), ctx


def send_plain(caller: Caller, wire: torch.Tensor, name: str) -> int:
    """Start the all-reduce that Horovod's optimizer would start for a gradient; return its handle.

    wire : overwritten with the result
    """
    # The factor is split as in Horovod's optimizer; Horovod divides by the number of ranks itself.
    average = caller.op == hvd.Average
    divisor = caller.optimizer.gradient_predivide_factor if average else 1.0
    return hvd.allreduce_async_(  # type: ignore[no-any-return]
        wire, name=name, op=caller.op, prescale_factor=1.0 / divisor, postscale_factor=divisor,
        process_set=caller.process_set,
    )  # fmt: skip


def placeholder(gradient: torch.Tensor) -> torch.Tensor:
    """Return the zero that Horovod reduces in place of a gradient that travels in a bucket."""
    # Same dtype as on the wire: grouped all-reduces need a single one, and may have plain tensors.
    return torch.zeros(1, dtype=wire_type(gradient), device=gradient.device)


def wire_type(gradient: torch.Tensor) -> torch.dtype:
    """Return the dtype for a gradient in Horovod's own all-reduce, which lacks bfloat16."""
    # float16 stays: error feedback covers the rounding of a dense step.
    return torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
