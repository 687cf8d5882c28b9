"""What kernels of a GPU that is not here take while they run, beside arguments and results.

Of attention it follows from what the kernels allocate: flash attention's backward sums the gradient
of queries in float32. Of convolutions it is an estimate: cuDNN's choice is not known here. For half
types, and TF32, tensor cores read channels last, so that a convolution of tensors that lie
otherwise copies them; what an algorithm takes beyond that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...cost.devices import NamedDevice
from .cpu_scratch import Form

_FLASH = "_scaled_dot_product_flash_attention_backward"
_CUDNN = "_scaled_dot_product_cudnn_attention_backward"
_EFFICIENT = "_scaled_dot_product_efficient_attention_backward"
_CONVOLUTIONS = ("convolution", "convolution_backward")
_ROWS = 128  # flash attention pads lengths to it


def scratch_bytes(name: str, forms: Sequence[Form], gpu: NamedDevice) -> int:
    """Return the workspace of a call, by its name and the forms of its tensors."""
    if name in (_FLASH, _CUDNN):
        # Arguments: the gradient, query, key, value ...: [batch, heads, length, head].
        batch, heads, length, head = forms[1][0]
        rows = -(-length // _ROWS) * _ROWS
        return batch * heads * rows * (head + 1) * 4
    if name == _EFFICIENT:
        batch, heads, length, head = forms[1][0]
        half = forms[1][2].itemsize < 4
        return batch * heads * length * ((head * 4 if half else 0) + 4)
    if name in _CONVOLUTIONS and _on_tensor_cores(forms[0][2], gpu):
        copied = forms[:3] if name == "convolution_backward" else forms[:2]
        return sum(math.prod(it[0]) * it[2].itemsize for it in copied if not _channels_last(it))
    return 0


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor."""
    return tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype


def _on_tensor_cores(dtype: torch.dtype, gpu: NamedDevice) -> bool:
    if dtype == torch.float32:
        return "tf32" in dict(gpu.flops_per_s) and torch.backends.cudnn.allow_tf32
    return dtype in (torch.float16, torch.bfloat16)


def _channels_last(form: Form) -> bool:
    size, stride, _ = form
    return len(size) < 3 or size[1] == 1 or stride[1] == 1
