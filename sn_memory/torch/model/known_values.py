"""Which tensors have values that a model may look at, and whether all of them are ones."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Elements of a tensor whose values are computed.
MOST_KNOWN = 1 << 20
# Torch has others, for storing only: they cannot even be compared.
INTEGERS = {
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
# What is made of integers, or of nothing, may be floats on its way to a mask.
COMPUTED = {*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64}


def may_be_known(tensor: torch.Tensor, dtypes: Container[torch.dtype] = INTEGERS) -> bool:
    """Whether a tensor has values that a model may look at: a few that are there.

    dtypes : of an input, integers: floats of ones are what many write for any input
    """
    return (
        tensor.dtype in dtypes
        and tensor.layout == torch.strided
        and not isinstance(tensor, FakeTensor)
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_meta
        and tensor.numel() <= MOST_KNOWN
    )


def is_ones(value: object) -> bool:
    """Whether it is a tensor whose values may be known, and all are 1.

    On a GPU this waits for it, as a model that looks does.
    """
    return isinstance(value, torch.Tensor) and may_be_known(value) and bool((value == 1).all())
