"""The caller of `compress` while TensorFlow traces: gradient, operation, functions being traced.

As in torch/under_horovod/hooks.py, the caller is read from the local variables of Horovod's own
functions, those of release 0.28.1. Two things differ. AutoGraph rewrites these functions
("tf__allreduce" for "allreduce") and puts its own frames between them, so all frames above are
searched. And a traced gradient has no name: it is identified by its index among the gradients of
one call, and Horovod's function has their variables as well.

The functions being traced are found on the stack as well: their traces are discarded when the next
step needs a different graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from ..errors import CompressError

_as_written = tf.autograph.experimental.do_not_convert

_log = logging.getLogger(__name__)
_MODULE = "horovod.tensorflow"
# TensorFlow 2.21 traces functions here; the traced function's arguments are among its locals.
_TRACER, _TRACER_MODULE = "func_graph_from_py_func", "tensorflow.python.framework.func_graph"
_REDUCE = ("allreduce", "grouped_allreduce")
# Ops that scale or cast a gradient, as clipping and unscaling do, but keep what it belongs to.
_PASSING = frozenset(
    {
        "Cast", "ClipByValue", "DivNoNan", "EnsureShape", "Identity", "IdentityN", "If", "Maximum",
        "Minimum", "Mul", "Neg", "RealDiv", "Reshape", "Select", "SelectV2", "StatelessIf",
        "StopGradient",
    }
)  # fmt: skip
_SCATTER = ("reducescatter", "grouped_reducescatter")


@dataclass(frozen=True)
class Call:
    """One tensor passed to `compress`.

    Attributes
    ----------
    compression : the object passed to Horovod as `compression=`
    name : the name passed to hvd.allreduce, or None
    sources, place : the variables of a tape and the gradient's index among them; None for a
        plain hvd.allreduce; place is also None if a tensor is the gradient of several variables
    op, process_set, scale : the operation, the process set, product of pre- and postscale factors
    ignore_name_scope : as passed to hvd.allreduce
    gradients : all gradients of the tape, including None and sparse ones, for which `compress` is
        not called; empty for a plain hvd.allreduce
    branch : whether Horovod has put the tensor in a branch of its own tf.cond
    """

    compression: Any
    name: str | None
    sources: Sequence[Any] | None
    place: int | None
    op: Any
    process_set: Any
    scale: float
    ignore_name_scope: bool
    gradients: Sequence[Any] = ()
    branch: bool = False

    def factor(self) -> float:
        """Return result / mean; an elastic run changes the number of ranks."""
        return float(self.scale * (self.process_set.size() if self.op == hvd.Sum else 1))


def find_call(frame: FrameType | None, tensor: Any) -> Call:
    """Read the call from the frames above `compress`; CompressError if it is not Horovod's."""
    frames = _horovod_frames(frame)
    for function, local in frames:
        if function in _SCATTER:
            raise CompressError(
                "compression cannot be used with reducescatter, which cuts the payload in "
                "pieces. Use Compression.none or Compression.fp16 there."
            )
        if function in _REDUCE:
            sources, place, gradients = _place(frames, tensor)
            return Call(
                compression=local["compression"],
                name=_name(function, local, tensor),
                sources=sources,
                place=place,
                op=local["op"],
                process_set=local["process_set"],
                scale=local["prescale_factor"] * local["postscale_factor"],
                ignore_name_scope=local["ignore_name_scope"],
                gradients=gradients,
                branch=sources is not None,
            )
    raise CompressError(
        "compress of a compression was not called by Horovod 0.28.1; expected it as compression= "
        "of hvd.DistributedGradientTape, hvd.allreduce or sn_compress.tensorflow.keras."
        "DistributedOptimizer. To encode a vector use FFTCodec."
    )


def functions_of(frame: FrameType | None) -> list[Any]:
    """Return every tf.function being traced on this stack, the innermost first."""
    # All of them: an outer function contains the graph of an inner one, and would run the old one.
    functions: list[Any] = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, polymorphic_function.Function) and all(
            owner is not other for other in functions
        ):
            functions.append(owner)
        frame = frame.f_back
    return functions


@cache
def warn_of_engine_once() -> None:
    """Warn that steps cannot be nodes of a graph."""
    _log.warning(
        "no tf.function that is being traced was found in TensorFlow %s: gradients are compressed "
        "by a Python function in the graph, which is slower",
        tf.__version__,
    )


def passed(frame: FrameType | None) -> list[Any]:
    """Return the handles of variables that are arguments of a function being traced.

    Such a trace is reused for any variables of the same shapes, though it shows the first call's.
    """
    handles = []
    while frame is not None:
        if frame.f_code.co_name == _TRACER and frame.f_globals.get("__name__") == _TRACER_MODULE:
            try:
                arguments = frame.f_locals["func_args"], frame.f_locals["func_kwargs"]
            except KeyError as error:
                raise CompressError(
                    f"TensorFlow {tf.__version__} stores the arguments of a function that it "
                    "traces elsewhere than release 2.21 does. Use release 2.21, and please report "
                    "your version."
                ) from error
            handles += [v.handle for v in tf.nest.flatten(arguments) if isinstance(v, tf.Variable)]
        frame = frame.f_back
    return handles


def forget(function: Any) -> None:
    """Make a tf.function retrace at its next call; TensorFlow has no API for that."""
    # A function that creates variables in its first trace has a second trace that does not.
    try:
        for traced in (function._variable_creation_config, function._no_variable_creation_config):
            if traced is not None:
                traced.function_cache.clear()
        # Retracing is intended, so TensorFlow must not warn about it.
        tracings = polymorphic_function._frequent_tracing_detector_manager
        with tracings._lock:
            tracings._detectors.pop(function._key_for_call_stats, None)
    except AttributeError as error:
        raise CompressError(
            f"TensorFlow {tf.__version__} stores the traces of a tf.function elsewhere than "
            "release 2.21 does, so LowRankCompression cannot have it retraced. Use release 2.21, "
            "and please report your version."
        ) from error


def was_reduced(gradient: Any) -> bool:
    """Whether a gradient is a result of Horovod's collectives, perhaps clipped or unscaled since.

    False if that cannot be determined: eagerly, and for arguments of a function.
    """
    waiting = [gradient] if tf.is_symbolic_tensor(gradient) else []
    seen: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        operation = tensor.op
        if id(operation) in seen:
            continue
        seen.add(id(operation))
        if operation.type.startswith("Horovod") or _reduces_in_branch(operation):
            return True
        if operation.type == "Placeholder":  # perhaps a captured input of a branch
            captures = getattr(operation.graph, "captures", ())
            outer = [outside for outside, inside in captures if inside is tensor]
            waiting += [outside for outside in outer if tf.is_symbolic_tensor(outside)]
        elif operation.type in _PASSING:
            # Not scalar factors: a norm over all ranks may clip a gradient of this rank.
            n = tensor.shape.num_elements()
            waiting += [value for value in operation.inputs if value.shape.num_elements() == n != 1]
    return False


def _reduces_in_branch(operation: Any) -> bool:
    """Whether this is Horovod's tf.cond around a collective, as a tape has for each tensor."""
    if operation.type not in ("If", "StatelessIf"):
        return False
    branch = operation.graph._get_function(operation.get_attr("then_branch").name)
    nodes = () if branch is None else branch.definition.node_def
    return any(node.op.startswith("Horovod") for node in nodes)


def _horovod_frames(frame: FrameType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            # AutoGraph adds this prefix to the names of functions that it has rewritten.
            yield frame.f_code.co_name.removeprefix("tf__"), frame.f_locals
        frame = frame.f_back


def _name(function: str, local: dict[str, Any], tensor: Any) -> str | None:
    name: str | None = local["name"]
    if name is None or function == "allreduce":
        return name
    place = _only(local["tensors"], tensor)
    return None if place is None else f"{name}.{place}"


def _place(
    frames: Iterator[tuple[str, dict[str, Any]]], tensor: Any
) -> tuple[Sequence[Any] | None, int | None, Sequence[Any]]:
    for function, local in frames:
        if function == "allreduce_grads":
            grads = local["grads"]
            return local["vars"] or [None] * len(grads), _only(grads, tensor), list(grads)
    return None, None, ()


def _only(tensors: Sequence[Any], tensor: Any) -> int | None:
    # By identity, as tensors compare element by element.
    places = [place for place, member in enumerate(tensors) if member is tensor]
    return places[0] if len(places) == 1 else None


@dataclass(frozen=True)
class Cast:
    """A tensor sent uncompressed, in a dtype that Horovod can reduce."""

    dtype: tf.DType

    @_as_written
    def finish(self, reduced: Any) -> Any:
        return tf.cast(reduced, self.dtype)


def wire_type(tensor: Any) -> Any:
    """Return the dtype in which an uncompressed tensor is sent: Horovod cannot reduce bfloat16."""
    return tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype


class Plain:
    """A Horovod compression that only casts bfloat16, which Horovod cannot reduce."""

    @staticmethod
    @_as_written
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod."""
        wire = wire_type(tensor)
        return (
            (tensor, None) if wire == tensor.dtype else (tf.cast(tensor, wire), Cast(tensor.dtype))
        )

    @staticmethod
    @_as_written
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Called by Horovod."""
        return tensor if ctx is None else ctx.finish(tensor)
