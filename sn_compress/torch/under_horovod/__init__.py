"""Internals of `torch/horovod.py`: the caller of `compress`, exchanges in flight, optimizer state.

May import torch, horovod.torch and all of the core; of `torch` only modules without Horovod.
"""

from ...errors import need

need("horovod", "sn_compress.torch.horovod")

import horovod.torch as hvd  # noqa: E402 - after the helpful error if it is missing

__all__ = ["hvd"]
