"""Scratch and arithmetic of the op behind `torch.nn.functional.linear_cross_entropy`.

It computes product, loss and gradients some rows at a time (torch 2.13), inside one op, so a trace
does not see the calls in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from .model.snapshot import named_arguments

_NAMESPACE: Final = "torch_nn"


def is_chunked_loss(target: Any) -> bool:
    """Whether an op is torch's chunked loss."""
    return bool(target.namespace == _NAMESPACE)


def chunked_flops(target: Any, args: Sequence[Any]) -> float:
    """Return the FLOPs of torch's chunked loss; args have sizes in the place of tensors."""
    arguments = named_arguments(target, args, {})
    rows, width = arguments["input"]
    products = 1  # the logits; each requested gradient takes another
    products += arguments.get("compute_input_grad", False)
    products += arguments.get("compute_linear_weight_grad", False)
    return 2.0 * rows * width * arguments["linear_weight"][0] * products


def no_values(view: Any) -> torch.Tensor:
    """Return a tensor without memory that has the size and type of a recorded view."""
    return torch.empty(view.size, dtype=view.dtype, device="meta")


def chunked_scratch(target: Any, args: Sequence[Any], device: torch.device) -> int:
    """Return an upper bound of the scratch memory of torch's chunked loss.

    Derived from the buffers in its code in torch 2.13. In half precision, CPU kernels additionally
    copy the weight and its gradient in float32. Where ops are timed, it is measured instead.
    """
    arguments = named_arguments(target, args, {})
    rows, width = arguments["input"].shape
    classes, chunk = arguments["linear_weight"].shape[0], min(rows, arguments["batch_chunk_size"])
    dtype, policy = arguments["input"].dtype, arguments["acc_policy"]
    own, wide = dtype.itemsize, arguments["acc_dtype"].itemsize
    mixed, on_gpu = wide != own, device.type == "cuda"
    # float16 keeps logits in the dtype of the product, unless the policy is "accurate".
    cast = mixed and not (dtype == torch.float16 and policy != "accurate")
    weight = classes * width * wide
    # Logits of a chunk; where they are cast back, those of the previous chunk as well.
    taken = chunk * classes * (wide + (2 * own if mixed else 0))
    # Rows that are gathered, scaled and cast; sums of a chunk; labels and their weights.
    taken += 3 * chunk * width * wide + 2 * classes * wide + 16 * (rows + chunk)
    if policy != "compact" or (cast and not on_gpu):
        taken += weight  # what a chunk contributes to the gradient of the weight
    if cast and (policy == "accurate" or not on_gpu):
        taken += weight
    if mixed and policy == "accurate":
        taken += rows * width * wide
    if mixed and not on_gpu:
        taken += 2 * weight
    return int(taken)
