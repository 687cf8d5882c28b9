"""Which calls may be timed on tensors that are made up.

A call is timed on random floats and on integers that are 0. Most kernels take any; some read or
write where an integer says, or take bytes that another kernel packed, and then made-up ones end the
process, or on a GPU its context. Errors can be caught, that cannot. So the rule names what is safe
and leaves the rest to the roofline:

- of torch's own ops only: what others registered may expect anything, and a collective waits;
- whatever takes floats and truth values alone, unless it is named here as odd;
- with integers among its tensors, what works element by element, what reduces, sorts or moves, and
  what indexes with checks, so that 0 is an index like another.
"""

from __future__ import annotations

import torch

from .record import Call, View

_OWN = ("aten", "prims", "torch_nn")
_ANY_INTEGER = (torch.Tag.pointwise, torch.Tag.reduction)
_MOVES = (
    "copy_ _to_copy _copy_from clone fill_ zero_ cat stack repeat roll flip constant_pad_nd "
    "tril triu slice_backward slice_scatter select_backward select_scatter diagonal_scatter "
    "as_strided_scatter unfold_copy cumsum cumprod cummax cummin logcumsumexp sort topk "
    "argsort argmax argmin max min median mode sum mean prod any all amax amin floor_divide "
    "bincount searchsorted bucketize one_hot unique_dim unique_consecutive eye arange mm bmm "
    "addmm matmul dot "
)
_INDEXES = (
    "embedding embedding_dense_backward index _unsafe_index index_put index_put_ "
    "_unsafe_index_put _index_put_impl_ index_select index_select_backward index_add "
    "index_add_ index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_ "
    "gather take take_along_dim put put_ scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_ nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward value_selecting_reduction_backward "
    "_linear_cross_entropy_batch_chunked _linear_cross_entropy_batch_chunked_no_reduction "
)
# Their integers are the seed and the place of random numbers.
_SEEDED = (
    "_scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention_backward native_dropout_backward "
)
# What another kernel packed is made by that kernel, where ops are run.
_PACKED = "mkldnn_rnn_layer_backward "
_INTEGERS = frozenset((_MOVES + _INDEXES + _SEEDED + _PACKED).split())
# Floats that another kernel packed, or that must belong together.
_ODD = (
    "_cudnn_rnn _cudnn_rnn_backward _cudnn_rnn_flatten_weight "
    "miopen_rnn miopen_rnn_backward _ctc_loss _ctc_loss_backward _cudnn_ctc_loss "
    "cudnn_batch_norm_backward mkldnn_linear mkldnn_reorder_conv2d_weight "
)
_NOT_TIMED = frozenset(_ODD.split())


def timeable(call: Call) -> bool:
    """Say whether a call may be run on tensors that are made up."""
    if call.target.namespace not in _OWN or call.name in _NOT_TIMED:
        return False
    if all(_harmless(arg.dtype) for arg in call.flat if isinstance(arg, View)):
        return True
    return call.name in _INTEGERS or any(tag in call.target.tags for tag in _ANY_INTEGER)


def _harmless(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
