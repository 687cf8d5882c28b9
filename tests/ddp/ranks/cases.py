"""What the rank programs here share: the group of processes, and a run of their cases.

A program is given its rank, the number of ranks, a file by which they meet, and names of cases.
"""

import contextlib
import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


@contextlib.contextmanager
def process_group():
    """The group of all ranks, over Gloo."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=int(sys.argv[1]),
        world_size=int(sys.argv[2]), timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    yield
    time.sleep(0.2)  # docs/ddp.md says why
    dist.destroy_process_group()


def run(cases):
    """Run those that were asked for by name, or all."""
    for case in cases:
        if sys.argv[4:] and case.__name__ not in sys.argv[4:]:
            continue
        start = time.monotonic()
        case()
        print(f"ok {case.__name__} ({time.monotonic() - start:.1f} s)", flush=True)


class OfType(nn.Module):
    """A layer, and a parameter of any type."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self.w = nn.Parameter(torch.randn(64, 64).to(dtype))

    def forward(self, x):
        w = torch.view_as_real(self.w.to(torch.cfloat)).sum(-1) if self.w.is_complex() else self.w
        return self.layer(x) @ w.float()
