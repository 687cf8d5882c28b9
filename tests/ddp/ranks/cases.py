"""What the rank programs here share: the group of processes, what is the same on all, their cases.

A program is given its rank, the number of ranks, a file by which they meet, and names of cases.
"""

import contextlib
import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from sn_compress import CompressError

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])


@contextlib.contextmanager
def process_group(seconds=30):
    """The group of all ranks, over Gloo."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS,
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip
    yield
    time.sleep(0.2)  # docs/ddp.md says why
    dist.destroy_process_group()


def run(cases, before=lambda: None):
    """Run those that were asked for by name, or all."""
    for case in cases:
        if sys.argv[4:] and case.__name__ not in sys.argv[4:]:
            continue
        start = time.monotonic()
        before()
        case()
        print(f"ok {case.__name__} ({time.monotonic() - start:.1f} s)", flush=True)


def everyone(value):
    """What each rank has."""
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def gathered(tensor):
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.detach().contiguous()
    every = [torch.empty_like(flat) for _ in range(RANKS)]
    dist.all_gather(every, flat)
    return every


def same_on_all(tensor):
    every = gathered(tensor)
    return all(torch.equal(every[0], other) for other in every)


def message_of(call, kinds=CompressError):
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("an error was to be raised")


def said_by_all(call, kinds=CompressError):
    """The message that every rank was given; it has to be the same one."""
    every = everyone(message_of(call, kinds))
    assert len(set(every)) == 1, every
    return every[0]


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
