"""What kernels of a GPU that is not here take while they run, beside arguments and results.

Of attention it follows from what the kernels allocate: flash attention's backward sums the gradient
of queries in float32. Of convolutions it is an estimate: cuDNN's choice is not known here. For half
types, and TF32, tensor cores read channels last, so that a convolution of tensors that lie
otherwise copies them; what an algorithm takes beyond that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cost.devices import NamedDevice
from ...graph.records import Workspace
from .record import Recording, View

_FLASH = "_scaled_dot_product_flash_attention_backward"
_CUDNN = "_scaled_dot_product_cudnn_attention_backward"
_EFFICIENT = "_scaled_dot_product_efficient_attention_backward"
_CONVOLUTIONS = ("convolution", "convolution_backward")
_ROWS = 128  # flash attention pads lengths to it


def scratch_ways(recording: Recording, gpu: NamedDevice) -> list[tuple[Workspace, ...]]:
    """Return per call of a recording its workspace, as an op of a graph states it."""
    sizes = [scratch_bytes(call.name, call.flat, gpu) for call in recording.calls]
    return [(Workspace(size),) if size else () for size in sizes]


def scratch_bytes(name: str, flat: Sequence[object], gpu: NamedDevice) -> int:
    """Return the workspace of a call, by its name and its flat arguments (Views or tensors)."""
    forms = [it for it in flat if isinstance(it, View | torch.Tensor)]
    if name in (_FLASH, _CUDNN):
        # Arguments: the gradient, query, key, value ...: [batch, heads, length, head].
        batch, heads, length, head = _size(forms[1])
        rows = -(-length // _ROWS) * _ROWS
        return batch * heads * rows * (head + 1) * 4
    if name == _EFFICIENT:
        batch, heads, length, head = _size(forms[1])
        half = forms[1].dtype.itemsize < 4
        return batch * heads * length * ((head * 4 if half else 0) + 4)
    if name in _CONVOLUTIONS and _on_tensor_cores(forms[0].dtype, gpu):
        copied = forms[:3] if name == "convolution_backward" else forms[:2]
        return sum(_bytes(it) for it in copied if not _channels_last(it))
    return 0


def _on_tensor_cores(dtype: torch.dtype, gpu: NamedDevice) -> bool:
    fast = dict(gpu.flops_per_s)
    if dtype == torch.float32:
        return "tf32" in fast and torch.backends.cudnn.allow_tf32
    return dtype in (torch.float16, torch.bfloat16)


def _size(form: View | torch.Tensor) -> tuple[int, ...]:
    return tuple(form.size) if isinstance(form, View) else tuple(form.size())


def _stride(form: View | torch.Tensor) -> tuple[int, ...]:
    return form.stride if isinstance(form, View) else form.stride()


def _bytes(form: View | torch.Tensor) -> int:
    count = 1
    for length in _size(form):
        count *= length
    return count * form.dtype.itemsize


def _channels_last(form: View | torch.Tensor) -> bool:
    size, stride = _size(form), _stride(form)
    return len(size) < 3 or size[1] == 1 or stride[1] == 1
