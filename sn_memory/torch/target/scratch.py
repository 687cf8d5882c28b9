"""Scratch of kernels that are not run: memory besides arguments and results, by rule.

On the CPU oneDNN uses blocked layouts and workspaces, and other kernels copy tensors that are not
in the layout they read, all by torch's allocator and inside one op. If ops are timed, scratch is
measured (trace/op_seconds.py); the rule here is an upper bound.

On a named GPU the scratch of attention follows from what the kernels allocate: flash attention's
backward sums the gradient of queries in float32. For convolutions it is an estimate, as cuDNN's
choice is not known here: for half types, and TF32, tensor cores read channels last, so a
convolution copies tensors in other layouts; other memory of an algorithm is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from ...cost.devices import NamedDevice

# Sizes, strides and dtype of a tensor.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

# oneDNN's layouts block channels by at most this many (nChw16c).
_BLOCK: Final = 16
# For a single image below this size torch may use its own kernels, which unfold the image.
_UNFOLDED: Final = 20480
# Bytes per thread of a convolution for sums and tables, whatever its size.
_TABLES: Final = 64 << 10
# Flash attention processes at most this many keys at a time, in each thread.
_KEYS: Final = 512

_CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable", "convolution_backward")
# These copy arguments that are not contiguous.
_COPYING = (
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "native_batch_norm embedding_dense_backward max_pool2d_with_indices "
    "avg_pool2d avg_pool2d_backward max_pool2d_with_indices_backward"
)
_COPIES = frozenset(_COPYING.split())
# These read matrices with contiguous rows or columns, and copy others.
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
_FLASH = "_scaled_dot_product_flash_attention_backward"
_CUDNN = "_scaled_dot_product_cudnn_attention_backward"
_EFFICIENT = "_scaled_dot_product_efficient_attention_backward"
_ROWS = 128  # flash attention pads lengths to it
_HALF = (torch.float16, torch.bfloat16)


def cpu_scratch_bytes(name: str, inputs: Sequence[Form], outputs: Sequence[Form]) -> int:
    """Return an upper bound on a CPU kernel's scratch, by its name and the forms of its tensors.

    Derived from measurements of torch 2.13 with oneDNN on AVX2, AVX-512 and AMX, op by op; tests
    contain examples. Ops that are not listed take next to nothing.
    """
    results = sum(map(_bytes, outputs))
    if name in _CONVOLUTIONS:
        return _convolution(name, inputs, outputs)
    if name == "native_batch_norm_backward":
        # The gradient in the input's layout, and a copy of either that is not contiguous.
        return _bytes(inputs[0]) + _copied(inputs[:2])
    if name.startswith(("upsample_", "_upsample_")):
        return results + sum(map(_bytes, inputs))
    if name == "roll":
        return results
    if name == "_safe_softmax":
        rows = math.prod(inputs[0][0]) // max(1, inputs[0][0][-1])
        return math.prod(inputs[0][0]) + 2 * rows
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return _attention(name, inputs) + _copied(inputs)
    if name.startswith("mkldnn_rnn_layer"):
        return _recurrent(inputs, results)
    if name in _PRODUCTS:
        return _copied([form for form in inputs if not _is_matrix(form)])
    if name in ("_softmax", "_log_softmax"):
        return 2 * _copied(inputs)
    return _copied(inputs) if name in _COPIES else 0


def _convolution(name: str, inputs: Sequence[Form], outputs: Sequence[Form]) -> int:
    backward = name == "convolution_backward"
    # Backward: the gradient, the input, the weight. Forward: the input and the weight.
    images, weight = [*inputs[: 2 if backward else 1], *outputs[:1]], inputs[2 if backward else 1]
    if not backward and not outputs:
        return 0
    blocked = sum(_blocked(image) for image in images)
    taken_in = inputs[1 if backward else 0][0]
    channels = max(1, taken_in[1] if len(taken_in) > 1 else 1)
    size, _, dtype = weight
    groups = max(1, channels // max(1, size[1]))
    outer = _in_blocks(max(1, size[0] // groups)) * groups
    padded = outer * _in_blocks(size[1]) * math.prod(size[2:]) * dtype.itemsize
    threads = torch.get_num_threads()
    taken = threads * _TABLES + blocked + (2 if backward else 1) * padded
    spatial = max(math.prod(image[0][2:]) for image in images)
    batch = images[0][0][0]
    unfolded = spatial * math.prod(size[1:]) * dtype.itemsize
    alone = batch == 1 and math.prod(images[0][0]) <= _UNFOLDED
    # An upper bound: other dtypes than float32 may be unfolded as well.
    unfolded_at_once = batch if alone or dtype != torch.float32 else 0
    if groups > 1:
        # For groups of few channels oneDNN unfolds one image at a time, in each thread.
        unfolded_at_once = max(unfolded_at_once, threads)
    return taken + unfolded_at_once * unfolded


def _in_blocks(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _blocked(image: Form) -> int:
    """Bytes of an image whose channels are padded to a block."""
    size, _, dtype = image
    if len(size) < 2:
        return _bytes(image)
    return size[0] * _in_blocks(size[1]) * math.prod(size[2:]) * dtype.itemsize


def _attention(name: str, inputs: Sequence[Form]) -> int:
    """Bytes of flash attention's float32 blocks of scores, sums and results, in all threads."""
    shift = 1 if name.endswith("backward") else 0  # the gradient comes first
    (queries, head), keys = inputs[shift][0][-2:], inputs[shift + 1][0][-2]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    rows, columns = min(rows, queries), min(_KEYS, keys)
    row_bytes = 2 * rows * columns if shift else rows * (columns + head + 2)
    # For half types scores are kept in both dtypes.
    half = rows * columns * 2 if inputs[0][2].itemsize < 4 else 0
    return (4 * row_bytes + 2 * half) * torch.get_num_threads()


def _recurrent(inputs: Sequence[Form], results: int) -> int:
    # The gates of all steps, and weights in blocks; arguments are the input and two weights.
    steps, batch = inputs[0][0][:2]
    gates = steps * batch * inputs[2][0][0] * inputs[0][2].itemsize
    weights = _bytes(inputs[1]) + _bytes(inputs[2])
    return gates + weights + results + (gates + weights) // 16


def _copied(inputs: Sequence[Form]) -> int:
    return sum(_bytes(form) for form in inputs if not _contiguous(form))


def _is_matrix(form: Form) -> bool:
    """Whether BLAS can read the last two dimensions, as they are or transposed."""
    size, stride, _ = form
    if len(size) < 2:
        return True
    (rows, columns), (row_stride, next_to) = size[-2:], stride[-2:]
    return (next_to == 1 and row_stride >= columns) or (row_stride == 1 and next_to >= rows)


def _contiguous(form: Form) -> bool:
    size, stride, _ = form
    step = 1
    for length, spacing in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and spacing != step:
            return False
        step *= length
    return True


def _bytes(form: Form) -> int:
    return math.prod(form[0]) * form[2].itemsize


def gpu_scratch_bytes(name: str, forms: Sequence[Form], gpu: NamedDevice) -> int:
    """Return the workspace of a call on a named GPU, by its name and the forms of its tensors."""
    if name in (_FLASH, _CUDNN):
        # Arguments: the gradient, query, key, value ...: [batch, heads, length, head].
        batch, heads, length, head = forms[1][0]
        rows = -(-length // _ROWS) * _ROWS
        return batch * heads * rows * (head + 1) * 4
    if name == _EFFICIENT:
        batch, heads, length, head = forms[1][0]
        half = forms[1][2].itemsize < 4
        return batch * heads * length * ((head * 4 if half else 0) + 4)
    if name not in ("convolution", "convolution_backward"):
        return 0
    dtype = forms[0][2]
    tf32 = "tf32" in dict(gpu.flops_per_s) and torch.backends.cudnn.allow_tf32
    if dtype not in _HALF and not (dtype == torch.float32 and tf32):
        return 0  # not on tensor cores
    copied = forms[:3] if name == "convolution_backward" else forms[:2]
    return sum(
        _bytes((size, stride, dtype))
        for size, stride, dtype in copied
        if len(size) > 2 and size[1] != 1 and stride[1] != 1
    )
