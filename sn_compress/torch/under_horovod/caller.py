"""Who called `compress`: the parameter's name, the optimizer, the operation.

Horovod passes only the tensor. Keying by the order of calls would break as soon as two ranks
compute gradients in different orders, and keying by address as soon as gradients are freed, so
the answer is read from the local variables of Horovod's own calling function. They are those of
release 0.28.1, which is what `scripts/build_horovod.py` builds; anything else is an error, never
a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ...base.errors import CompressError

_DEEPEST = 6  # frames between Horovod's function and compress: subclasses, comprehensions


@dataclass(frozen=True)
class Caller:
    """`name` is None for an unnamed hvd.allreduce; `optimizer` for any hvd.allreduce.

    `opens` says that nothing of the same step, or call, is on its way. `parameter` is that of an
    optimizer whose gradient it is.
    """

    name: str | None
    optimizer: Any
    op: Any
    process_set: Any
    scale: float = 1.0  # pre- and postscale factors of hvd.allreduce
    average: bool | None = None  # deprecated way to say the operation
    opens: bool = True
    parameter: Any = None


@dataclass(frozen=True)
class Arrival:
    """What Horovod keeps as the handle of a gradient of ours, and calls for what came of it."""

    result: Callable[[], Any]

    def __call__(self) -> Any:
        return self.result()


def find_caller(frame: FrameType | None, tensor: Any) -> Caller:
    """Read the caller from the frames above `compress`; CompressError if it is not Horovod."""
    for _ in range(_DEEPEST):
        if frame is None:
            break
        module = frame.f_globals.get("__name__", "")
        reader = _READERS.get((module, frame.f_code.co_name))
        if reader:
            return reader(frame.f_locals, tensor)
        frame = frame.f_back
    raise CompressError(
        "compress of a compression was not called by Horovod 0.28.1; expected it as compression= "
        "of hvd.DistributedOptimizer or hvd.allreduce. To encode a vector use FFTCodec."
    )


def _gradient(local: dict[str, Any], tensor: Any) -> Caller:
    return caller_of(local["self"], local["p"])


def _grouped_gradient(local: dict[str, Any], tensor: Any) -> Caller:
    parameter = next(p for p in local["ps"] if p.grad is tensor)
    return caller_of(local["self"], parameter, first=parameter is local["ps"][0])


def caller_of(optimizer: Any, parameter: Any, *, first: bool = True) -> Caller:
    """An optimizer that asks about the gradient of a parameter.

    first : whether it is the first that it asks about in this call
    """
    name = optimizer._parameter_names.get(parameter)
    if hasattr(optimizer, "_starting_models"):  # only the Adasum optimizer has it
        raise CompressError(
            f"{name}: compression cannot be used with op=hvd.Adasum, which takes dot products "
            "of dense tensors. Use op=hvd.Average, or Compression.none with Adasum."
        )
    # Where gradients accumulate, those of earlier passes have None for a handle; a function that is
    # not ours is that of a sparse one, about which `compress` is never asked.
    handles = (handle for handle, _ in optimizer._handles.values())
    waits = (it is not None and (isinstance(it, Arrival) or not callable(it)) for it in handles)
    opens = first and not any(waits)
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
    """The optimizer and the parameter whose sparse gradients Horovod has gathered."""
    for _ in range(_DEEPEST):
        if frame is None:
            break
        module = frame.f_globals.get("__name__", "")
        if (module, frame.f_code.co_name) == ("horovod.torch.optimizer", "synchronize"):
            return frame.f_locals["self"], frame.f_locals["p"]
        frame = frame.f_back
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
