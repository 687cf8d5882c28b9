"""What the rank programs here share: the group of processes, a net, what is the same on all ranks.

A program is a list CASES of functions; `several.py` runs them.
"""

import contextlib
import copy
import datetime
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import CastCompression, CompressError, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

sys.path.append(str(Path(__file__).parents[2]))
import rank_programs
from rank_programs import logged as logged
from rank_programs import settle as settle

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
LAST = RANK == RANKS - 1

EXACT = FFTCompression.using(theta=0.0, values="fp16")
FFT, SHARED = FFTCompression.using(theta=0.9), LowRankCompression.using(warmup=2, ratio=20.0)
CAST = CastCompression.using(dtype="fp8")
LOSSY = FFT, SHARED, CAST


@contextlib.contextmanager
def process_group(seconds=60, backend="gloo", **options):
    """The group of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS,
        timeout=datetime.timedelta(seconds=seconds), **options,
    )  # fmt: skip
    yield
    time.sleep(0.2)  # docs/ddp.md says why
    dist.destroy_process_group()


def net(seed=0):
    """Eight parameters: four that are compressed, one of them between small ones."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 16))


def state_of(compression, model, *group, **options):
    return CompressionState(
        compression, *group, named_parameters=model.named_parameters(), **options
    )


def wrap(model, state, **options):
    """DDP with small buckets, so that there are several, and new ones after the first step."""
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.02, **options})
    ddp.register_comm_hook(state, compression_hook)
    return ddp


def hooked(model, compression, **options):
    state = state_of(compression, model)
    return wrap(model, state, **options), state


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def batch(step, size=8, features=64):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return torch.randn(size, features, generator=generator)


def loss_of(model, step):
    return model(batch(step)).float().square().mean()


def apply(ddp, optimizer, step):
    optimizer.zero_grad()
    loss_of(ddp, step).backward()
    optimizer.step()


def train(ddp, steps, optimizer=None):
    optimizer = optimizer or sgd(ddp)
    for step in steps:
        apply(ddp, optimizer, step)


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(some, others, why=""):
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other), why


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


def assert_alike(model, why=""):
    assert all(same_on_all(parameter) for parameter in model.parameters()), why


def mean(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / RANKS


def message_of(call, kinds=(CompressError, RuntimeError)):
    return rank_programs.message_of(call, kinds)


def said_by_all(call):
    """The message that every rank was given; it has to be the same one."""
    every = everyone(message_of(call))
    assert len(set(every)) == 1, every
    return every[0]


def own_memory(state, name, like):
    for exchange in (state.engine.feedback, state.engine.shared):
        if exchange.remembers(name):
            return torch.from_numpy(exchange.residual(name)).view(like.shape)
    return torch.zeros_like(like)


def residual(state, name, like):
    """What all ranks together have not sent yet, as a mean; of each node's, one rank has it."""
    own = own_memory(state, name, like)
    return mean(own if state.nodes is None else own * state.nodes.layout.size)


class Ledger:
    """Mean gradients that came in, and what went out: the difference is in the memory."""

    def __init__(self, model):
        self.model = model
        self.due = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.paid = copy.deepcopy(self.due)

    def owe(self, *steps):
        """The sum of this rank's own gradients, from a model that no hook is on."""
        own = copy.deepcopy(self.model)
        own.zero_grad()
        for step in steps:
            loss_of(own, step).backward()
        for name, p in own.named_parameters():
            self.due[name] += mean(torch.zeros_like(p) if p.grad is None else p.grad)

    def pay(self):
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.paid[name] += parameter.grad

    def check(self, state, scale=1.0):
        state.state_dict()  # between passes
        for name, due in self.due.items():
            kept = residual(state, name, due) / scale
            # Each of under 20 steps rounds sums of float32 as large as the gradients a few times,
            # and so does the transform: 20 * 2**-24 * log2(4096) = 1.4e-5 of the norm at worst.
            assert (self.paid[name] + kept - due).norm() <= 2e-5 * due.norm(), name
            if due.numel() >= 1024:
                assert (self.paid[name] - due).norm() > 1e-3 * due.norm(), "was it compressed?"


def fails_in_the_middle(module):
    """An exception in the backward pass behind this module; returns what takes it away again."""

    def hook(module, inputs, output):
        output.register_hook(lambda gradient: 1 / 0)

    return module.register_forward_hook(hook)


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


TYPES = sorted({it for it in vars(torch).values() if isinstance(it, torch.dtype)}, key=str)
