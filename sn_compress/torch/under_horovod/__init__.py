"""What the seam of Horovod's torch stands on: who calls, what is on its way, what is kept.

May import torch, Horovod's torch and all of the core; of `torch` only `outcomes.py`.
"""

from ...errors import need

need("horovod", "sn_compress.torch.horovod")

import horovod.torch as hvd  # noqa: E402 - what to do without it is said first

__all__ = ["hvd"]
