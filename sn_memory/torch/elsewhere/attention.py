"""Which kernel attention takes on a GPU, by the rules of torch 2.13.

They are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`: the order of the kernels,
and what each asks of types, sizes and masks. The switches of `torch.nn.attention.sdpa_kernel` hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
# torch's flash attention computes on heads padded to a multiple of this.
_HEAD_GRAIN = 8
_MASK_GRAIN = 16


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    capability: int,
) -> str:
    """Return `cudnn`, `flash`, `efficient` or `math` for attention on a GPU of this capability.

    query, key, value : [batch, heads, length, head]; capability : as 90; 0 for AMD's, where
    flash and efficient attention ask the same (AOTriton).
    """
    head, head_of_value = query.size(-1), value.size(-1)
    half, plain = query.dtype in _HALF, query.dim() == 4 and key.dim() == 4
    recent = capability >= 80 or capability == 0
    switches: Any = torch.backends.cuda
    if not plain or 0 in (*query.shape, *key.shape):
        return "math"
    if (
        switches.cudnn_sdp_enabled()
        and capability in (90, 100)
        and half
        and head == head_of_value
        and head % _HEAD_GRAIN == 0
        and head <= 128
    ):
        return "cudnn"
    if (
        switches.flash_sdp_enabled()
        and recent
        and half
        and mask is None
        and head == head_of_value
        and head <= _LARGEST_HEAD
        and not (capability in (86, 89, 120) and head > 192 and (head <= 224 or dropout > 0))
    ):
        return "flash"
    aligned = 8 if half else 4
    if (
        switches.mem_efficient_sdp_enabled()
        and (query.dtype in (torch.float16, torch.float32) or (recent and half))
        and head % aligned == 0
        and head_of_value % aligned == 0
    ):
        return "efficient"
    return "math"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    chosen: str,
) -> torch.Tensor:
    """Run attention by a kernel that is not `math`; arguments as of torch's own."""
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.full_like(zero, -math.inf))
    logsumexp = any(it.requires_grad for it in (query, key, value))
    if chosen == "flash":
        head = query.size(-1)
        scale = 1 / math.sqrt(head) if scale is None else scale
        padding = -head % _HEAD_GRAIN
        if padding:
            query, key, value = (
                torch.nn.functional.pad(it, (0, padding)) for it in (query, key, value)
            )
        result = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )[0]
        return result[..., :head] if padding else result
    if mask is not None:
        mask = _spread(mask, query, key)
    if chosen == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, logsumexp, dropout, causal, False, scale=scale
        )[0]
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, logsumexp, dropout, causal, scale=scale
    )[0]


def _spread(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as kernels read it: rows begin at multiples of 16, heads are views."""
    padding = -mask.size(-1) % _MASK_GRAIN
    length = mask.size(-1)
    if padding and length > 1:
        mask = torch.nn.functional.pad(mask, (0, padding))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
