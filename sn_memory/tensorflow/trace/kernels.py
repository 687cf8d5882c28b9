"""Memory behaviour of TensorFlow's kernels: which pass a buffer on, which overwrite an input.

The executor lets an elementwise kernel overwrite an input that has no other reference. A graph that
does not model this overestimates the peak. The table was measured: each kind was run alone under
the allocator's statistics, and a test repeats that.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import handle_data_util
from tensorflow.python.util import _pywrap_util_port


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The result is the input's buffer, under another shape.
ALIASES: Final = _kinds(
    "Bitcast CheckNumerics EnsureShape ExpandDims Identity IdentityN PreventGradient "
    "Reshape Snapshot Squeeze StopGradient"
)
# If a size is unknown, so is whether these pass all elements on.
_BY_SIZE: Final = _kinds("BroadcastTo Slice StridedSlice Tile")
# The result is the input's buffer if nothing changes.
MAYBE_ALIASES: Final = _kinds("AddN Cast ConcatV2 Slice StridedSlice Tile Transpose BroadcastTo")
# The result overwrites the first input of the same size and dtype whose last use this is.
OVERWRITES: Final = _kinds(
    "Abs Add AddN AddV2 BiasAdd Ceil Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor Inv "
    "LeakyRelu LeakyReluGrad Log Log1p LogSoftmax Maximum Minimum Mul MulNoNan Neg OnesLike Pow "
    "RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad "
    "SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax "
    "SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad "
    "Square SquaredDifference Sub Tanh TanhGrad Xdivy ZerosLike"
)
READS: Final = "ReadVariableOp"
# Known from static shapes alone.
SHAPES: Final = _kinds("BroadcastGradientArgs Rank Shape ShapeN Size")
LOOPS: Final = _kinds("Case If StatelessCase StatelessIf StatelessWhile While")
CALLS: Final = ("PartitionedCall", "StatefulPartitionedCall")
# Stateless by registration only: the Python function behind them may have any effect.
PYTHON: Final = _kinds("EagerPyFunc PyFunc PyFuncStateless")
# Stateful by registration only: they change nothing, and return the same when run again.
HARMLESS: Final = _kinds("Empty PlaceholderWithDefault VarHandleOp")


def passes_on(op: Any) -> bool:
    """Whether the results of an op are the buffers of its inputs, one by one."""
    if op.type in ALIASES:
        return True
    if op.type not in MAYBE_ALIASES or not op.outputs:
        return False
    source, result = op.inputs[0], op.outputs[0]
    if source.dtype != result.dtype or str(source.shape) != str(result.shape):
        return False
    if op.type in _BY_SIZE and not source.shape.is_fully_defined():
        return False
    if op.type in ("AddN", "ConcatV2"):
        # With a single tensor. ConcatV2 has its axis among the inputs, of another type.
        same = [v for v in op.inputs if v.dtype == result.dtype and v.shape.rank is not None]
        return len(same) == 1
    if op.type == "Transpose":
        order = constant(op.inputs[1])
        return order is not None and list(order) == list(range(len(order)))
    return True


def constant(tensor: Any) -> Any:
    """Return the value of a tensor that is known without running anything; else None."""
    if tensor.op.type == "ShapeN":  # TensorFlow knows `Shape` alone; Keras' convolutions use this
        shape = tensor.op.inputs[tensor.value_index].shape
        return np.array(shape.as_list(), np.int64) if shape.is_fully_defined() else None
    return tf.get_static_value(tensor)


def nbytes(tensor: Any) -> int | None:
    """Bytes of a tensor; 0 for handles, None if the trace does not determine them."""
    if tensor.dtype == tf.string and tensor.op.type == "Const":
        return sum(map(len, np.ravel(constant(tensor))))
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0 if tensor.dtype == tf.resource else None
    count = tensor.shape.num_elements()
    if count is None:
        count = _count_of_gradient(tensor)
    return None if count is None else int(count) * int(tensor.dtype.size)


def _count_of_gradient(tensor: Any) -> int | None:
    """Elements of a sum over a broadcast's axes, whose shape a trace leaves unknown."""
    op = tensor.op
    if op.type == "BroadcastGradientArgs":
        # At most one number per axis.
        return max(int(value.shape.num_elements() or 0) for value in op.inputs)
    if op.type != "Sum" or op.inputs[1].op.type != "BroadcastGradientArgs":
        return None
    shapes = [constant(value) for value in op.inputs[1].op.inputs]
    if any(shape is None for shape in shapes):
        return None
    # Summed over the axes of its first or second result, it has the shape of that input.
    own = shapes[op.inputs[1].value_index]
    return math.prod(int(size) for size in own)


def is_random(op: Any) -> bool:
    """Whether an op has its own random generator, so that it draws new numbers in a rerun."""
    attrs = op.node_def.attr
    return bool(op.op_def.is_stateful) and "seed" in attrs and "seed2" in attrs


def is_collective(op: Any) -> bool:
    """Whether an op communicates with other ranks."""
    return op.type.startswith(("Horovod", "Collective", "Nccl"))


def has_effect(op: Any) -> bool:
    """Whether an op changes something outside of its results.

    For loops, branches and calls their bodies decide, as all that read a variable are registered as
    stateful. A body that draws random numbers cannot be treated as one random op, so it counts.
    """
    if op.type in LOOPS or op.type in CALLS:
        return any(has_effect(inner) or is_random(inner) for inner in _inside(op))
    harmless = op.type in HARMLESS or op.type == READS or is_random(op)
    return is_collective(op) or op.type in PYTHON or (bool(op.op_def.is_stateful) and not harmless)


def _inside(op: Any) -> list[Any]:
    """Return the ops of all functions that an op may call."""
    attrs = op.node_def.attr.values()
    names = [
        function.name
        for attr in attrs
        for function in (attr.func, *attr.list.func)
        if function.name
    ]
    return [operation for name in names for operation in body_of(op, name).get_operations()]


def body_of(op: Any, name: str) -> Any:
    """Return the graph of a function that a loop or branch may run, with known shapes."""
    function = op.graph._get_function(name)
    if hasattr(function, "graph"):
        # The traced graph: rebuilt from its definition, it would lack the shapes of variables.
        return function.graph
    # A `Defun` of TensorFlow 1, like the scan inside tf.nn.ctc_loss, keeps only its definition.
    shapes = [value.shape for value in op.outputs] if "While" in op.type else None
    with op.graph.as_default():
        return function_def_to_graph.function_def_to_graph(function.definition, shapes)


def changes_variables(op: Any) -> bool:
    """Whether an op changes the variables among its inputs and nothing else."""
    return str(op.type).startswith(("Assign", "ResourceApply", "ResourceScatter", "ResourceSparse"))


def variables_read(op: Any) -> list[Any]:
    """Return the handles of variables among an op's inputs."""
    return [
        value
        for value in op.inputs
        if value.dtype == tf.resource and handle_data_util.get_resource_handle_data(value).is_set
    ]


def keeps_maxima(op: Any) -> bool:
    """Whether a max pooling also writes the positions of its maxima, for its gradient to read.

    oneDNN's does, if it replaces TensorFlow's: a byte for each element of the result.
    """
    return (
        op.type == "MaxPool"
        and op.outputs[0].dtype in (tf.float32, tf.bfloat16)
        and not tf.config.list_physical_devices("GPU")
        and bool(_pywrap_util_port.IsMklEnabled())
    )
