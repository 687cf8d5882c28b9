"""Rules of torch's fake tensors that are wrong, put right: recurrent layers, products, masks.

An LSTM layer on the CPU is one op of oneDNN. Its forward leaves a workspace for its backward,
larger than all else it makes; the rule for fake tensors has it empty. Where no gradient is wanted
it makes none. Its backward returns the gradient of the bias twice, in storages of their own; the
rule has one. Traced as torch says, memory is told at half and the backward kernel reads a workspace
that is not there.

Batch norm, some activations and losses lay their results out otherwise on the CPU than the rules
say, where their input is a transposed tensor; what follows then copies, or does not. Norms of
bfloat16 with parameters of float32 keep statistics in float32; the rules say bfloat16.

Products of groups of rows with a matrix each, as mixtures of experts compute them, run in any
floating-point type, and rows of their result are whole multiples of 16 bytes. torch's rule refuses
all but bfloat16, and where torch is built without CUDA it pads no rows.

A backward kernel computes the gradients that its `output_mask` asks for and returns None for the
rest. The rules for batch norm return a tensor for the gradient of the input in any case.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
CUDNN = torch.ops.aten._cudnn_rnn.default
CUDNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
# None where torch has no such op.
GROUPED = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
_ROW = 16
# Per mode of cuDNN (ReLU, tanh, LSTM, GRU), vectors of the hidden size that a step of a layer keeps
# for the backward pass: gates and states. An estimate; cuDNN does not document its own.
_CUDNN_KEEPS = (2, 2, 6, 5)
_PAGE = 4096
_FLOAT = 4


def _contiguous(out: torch.Tensor, args: tuple[Any, ...]) -> tuple[int, ...]:
    return make_contiguous_strides_for(out.size())


def _in_format_of(place: int) -> Callable[[torch.Tensor, tuple[Any, ...]], tuple[int, ...]]:
    """By channels where an argument lies so, else contiguous."""

    def stride(out: torch.Tensor, args: tuple[Any, ...]) -> tuple[int, ...]:
        if suggest_memory_format(args[place]) == torch.contiguous_format:
            return make_contiguous_strides_for(out.size())
        return make_channels_last_strides_for(out.size())

    return stride


def _as_arguments(out: torch.Tensor, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return strides like those of the first argument that says how: the gradient comes first."""
    alike = [it for it in args if isinstance(it, torch.Tensor) and it.size() == out.size()]
    return tuple(compute_elementwise_output_strides(*alike)) if alike else out.stride()


# Per op, how its kernel of the CPU lays its results out, where torch's rule says otherwise: it goes
# by a decomposition, or keeps what the kernel does not.
_ATEN = torch.ops.aten
_LAID_OUT: dict[Any, Callable[[torch.Tensor, tuple[Any, ...]], tuple[int, ...]]] = {
    _ATEN.native_batch_norm.default: _in_format_of(0),
    _ATEN.native_batch_norm_backward.default: _in_format_of(1),
    _ATEN.roll.default: _in_format_of(0),
    _ATEN.log_sigmoid_forward.default: _contiguous,
    _ATEN.rrelu_with_noise.default: _contiguous,
    _ATEN.glu_backward.default: _contiguous,
    **dict.fromkeys(
        (
            *(_ATEN.elu_backward.default, _ATEN.hardsigmoid_backward.default),
            *(_ATEN.hardswish_backward.default, _ATEN.hardtanh_backward.default),
            _ATEN.softplus_backward.default,
        ),
        _as_arguments,
    ),
    **dict.fromkeys(
        (
            *(_ATEN.huber_loss_backward.default, _ATEN.mse_loss_backward.default),
            _ATEN.smooth_l1_loss_backward.default,
        ),
        _contiguous,
    ),
}

# Where parameters have another type than the input, as under autocast, kernels of the CPU keep the
# statistics of a norm (results 1 and 2) in float32, and give the input's gradient in the input's
# type. Per op, which arguments may be parameters.
_STATISTICS = {
    _ATEN.native_batch_norm.default: slice(1, 5),
    _ATEN.native_group_norm.default: slice(1, 3),
    _ATEN.native_layer_norm.default: slice(2, 4),
}
_GROUP_NORM_BACKWARD = _ATEN.native_group_norm_backward.default


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging, with its stack, an error of a rule that it raises anyway.

    It is what a model without values says to a sample of the wrong shape.
    """

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addFilter(keep)
    try:
        yield
    finally:
        torchs.removeFilter(keep)


class FakeMode(FakeTensorMode):
    """Fake tensors, with torch's rules that are wrong put right."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is CUDNN_BACKWARD:
            return self._cudnn_gradients(args)
        if func is GROUPED:
            return self._grouped(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in _LAID_OUT:
            result = self._laid_out(func, args, result)
        if func is _ATEN.view.default and 1 in result.shape:
            result = self._viewed(args[0], result)
        if func in _STATISTICS or func is _GROUP_NORM_BACKWARD:
            result = self._typed(func, args, result)
        if func is LAYER:
            *made, _ = result
            return (*made, self._workspace(args) if torch.is_grad_enabled() else None)
        if func is CUDNN:
            return (*result[:3], self._reserve(args, result[0]), result[4])
        if func is LAYER_BACKWARD:
            gradients = list(result)
            with self:
                gradients[4] = torch.empty_like(gradients[3])
            return tuple(gradients)
        place = _mask_place(func)
        if place is not None and place < len(args) and isinstance(result, tuple):
            pairs = zip(result, args[place], strict=True)
            return tuple(gradient if wanted else None for gradient, wanted in pairs)
        return result

    def _laid_out(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Return results laid out as the kernel of the CPU does."""
        flat, spec = tree_flatten(result)
        for at, out in enumerate(flat):
            # Statistics beside the first result are vectors.
            if not isinstance(out, torch.Tensor) or out.dim() < 2 or out.device.type != "cpu":
                continue
            stride = _LAID_OUT[func](out, args)
            if stride != out.stride():
                with self:
                    flat[at] = torch.empty_strided(
                        out.size(), stride, dtype=out.dtype, device=out.device
                    )
        return tree_unflatten(flat, spec)

    def _viewed(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return a view with the kernel's strides of dimensions of one item.

        Nothing is read by them, but a product of matrices goes by them when it takes a kernel.
        """
        with _disable_current_modes():
            alone = torch.empty_strided(x.size(), x.stride(), device="meta")
            stride = alone.view(result.size()).stride()
        if stride == result.stride():
            return result
        with self:
            return torch.as_strided(result, result.size(), stride, result.storage_offset())

    def _typed(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Return results in the types in which the kernel of the CPU makes them."""
        made = list(result)
        if func is _GROUP_NORM_BACKWARD:
            wanted = {0: args[1].dtype}
        else:
            parameters = [it for it in args[_STATISTICS[func]] if isinstance(it, torch.Tensor)]
            mixed = any(it.dtype != args[0].dtype for it in parameters)
            wanted = dict.fromkeys((1, 2), torch.float32) if mixed else {}
        with self:
            for at, dtype in wanted.items():
                if made[at] is not None and made[at].device.type == "cpu":
                    made[at] = torch.empty_like(made[at], dtype=dtype)
        return tuple(made)

    def _reserve(self, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        mode, hidden, layers = args[6], args[7], args[9]
        train, both = args[12], args[13]
        steps = output.numel() // output.size(-1)
        count = steps * hidden * layers * (2 if both else 1) * _CUDNN_KEEPS[mode]
        with self:
            nbytes = count * output.element_size() if train else 0
            return torch.empty(nbytes, dtype=torch.uint8, device=output.device)

    def _cudnn_gradients(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients of input, states and weights; torch has no rule for them."""
        x, weights, hidden, cell, wanted = args[0], args[1], args[4], args[5], args[21]
        with self:
            made = [
                torch.empty_like(it) if it is not None and want else None
                for it, want in zip((x, hidden, cell), wanted, strict=False)
            ]
            return (*made, [torch.empty_like(it) for it in weights] if wanted[3] else [])

    def _grouped(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The product of groups: `offs` says where each ends, in the dimension that is shared."""
        del bias  # refused by the kernel
        size = grouped_size(tuple(first.shape), tuple(second.shape), offs)
        dtype = out_dtype or first.dtype
        padded = -(-size[-1] * dtype.itemsize // _ROW) * _ROW // dtype.itemsize
        stride = (padded, 1) if len(size) == 2 else (size[1] * padded, padded, 1)
        with self:
            return torch.empty_strided(size, stride, dtype=dtype, device=first.device)

    def _workspace(self, args: tuple[Any, ...]) -> torch.Tensor:
        x, cell, hidden = args[0], args[6], args[10]
        steps, batch, inputs = x.shape
        sizes = x.element_size(), cell.element_size()
        nbytes = workspace_bytes(steps, batch, inputs, hidden, *sizes)
        with self:
            return torch.empty(nbytes, dtype=torch.uint8, device=x.device)


def workspace_bytes(
    steps: int, batch: int, inputs: int, hidden: int, itemsize: int, cell_itemsize: int
) -> int:
    """Return the bytes that one direction of an LSTM layer leaves for its backward pass.

    oneDNN keeps each of these in whole pages: the gates; the states of layer and cell, with those
    before the first step and below the first layer; gradients of both and of the iteration, always
    in float32; one state more per step.
    """
    states, wide = 2 * (steps + 1) * batch, max(inputs, hidden)
    parts = (
        steps * batch * _row(4 * hidden, itemsize),
        states * _row(wide, itemsize),
        states * hidden * cell_itemsize,
        states * _row(wide, _FLOAT),
        states * _row(wide, _FLOAT),
        states * hidden * _FLOAT,
        steps * batch * _row(hidden, itemsize),
    )
    return sum(-(-part // _PAGE) * _PAGE for part in parts)


def grouped_size(
    first: tuple[int, ...], second: tuple[int, ...], offs: torch.Tensor | None
) -> tuple[int, ...]:
    """Return the size of a product of groups, given the sizes of its factors.

    A factor of two dimensions is cut into groups, one of three has a matrix a group. Cut are rows
    of the first or columns of the second; where both have two dimensions, the one they share.
    """
    rows, columns = first[-2], second[-1]
    if len(first) == len(second):
        groups = first[0] if offs is None else offs.shape[0]
        return groups, rows, columns
    return rows, columns


def grouped_flops(sizes: Sequence[tuple[int, ...]]) -> float:
    """Return the arithmetic of a product of groups; sizes are those of its tensors, in order."""
    first, second = sizes[:2]
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2.0 * groups * first[-2] * first[-1] * second[-1]


def layer_flops(func: Any, args: tuple[Any, ...]) -> float:
    """Return the arithmetic of a layer or of its backward, given the shapes of its arguments."""
    steps, batch, inputs = args[0]
    hidden = args[1][0] // 4
    forward = 2.0 * steps * batch * 4 * hidden * (inputs + hidden)
    return forward if func is LAYER else 2 * forward


def cudnn_flops(func: Any, sizes: Sequence[tuple[int, ...]]) -> float:
    """Return the arithmetic of cuDNN's layers: a product with each weight, for each row of input.

    sizes : of the tensors among the arguments; the input comes first
    """
    rows = math.prod(sizes[0][:-1])
    weights = sum(math.prod(it) for it in sizes[1:] if len(it) == 2)
    return (2.0 if func is CUDNN else 4.0) * rows * weights


def in_training(target: Any) -> Callable[..., Any]:
    """Return a layer's forward as it runs where gradients are wanted, whatever the mode is.

    The kernel asks for the mode of autograd, though autograd lies above it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return target(*args, **kwargs)

    return run


@cache
def _mask_place(func: Any) -> int | None:
    """Place of the argument that says which gradients a kernel is asked for; None without one."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


def _row(n: int, itemsize: int) -> int:
    """Bytes of a row of a matrix: whole cache lines, and no multiple of 256 elements."""
    line = 64 // itemsize
    n = -(-n // line) * line
    return (n + line if n % 256 == 0 else n) * itemsize
