"""One rank: theta follows every kind of schedule under DDP and FSDP2.

Run as `schedules.py RANK RANKS FILE [CASE...]`; prints "ok CASE" for each, or fails.
"""

import sys
from pathlib import Path

import torch
from cases import RANK, RANKS, everyone, process_group, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression
from sn_compress.torch.ddp import CompressionState, compression_hook
from sn_compress.torch.fsdp import compress_replicas

sys.path.append(str(Path(__file__).parents[2]))
from schedule_kinds import KINDS, Watch, check

STEPS, HALF = 14, 7
WATCH = Watch()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 16))


def loss_of(model, step):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    return model(torch.randn(8, 64, generator=generator)).square().mean()


def hooked(model, schedule):
    state = CompressionState(
        FFTCompression.using(theta=schedule), named_parameters=model.named_parameters()
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


def train(ddp, steps):
    """With accumulation: two backward passes a step, of which one is averaged."""
    for step in steps:
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, 2 * step).backward()
        loss_of(ddp, 2 * step + 1).backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= 0.1 * parameter.grad
        WATCH.end_step()


def under_ddp(kind):
    ddp, _ = hooked(net(), KINDS[kind])
    train(ddp, range(STEPS))
    check(kind, everyone(WATCH.taken()))
    whole = [p.detach().clone() for p in ddp.parameters()]
    # The same in two halves: a run that goes on is the run that never stopped.
    half, state = hooked(net(), KINDS[kind])
    train(half, range(HALF))
    saved = state.state_dict()
    again, state = hooked(half.module, KINDS[kind])
    state.load_state_dict(saved)
    train(again, range(HALF, STEPS))
    check(kind, everyone(WATCH.taken()))
    assert all(map(torch.equal, again.parameters(), whole)), f"{kind}: the resumed run differs"


def under_fsdp(kind):
    model = net()
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    compress_replicas(model, FFTCompression.using(theta=KINDS[kind]), mesh["replicate"])
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        WATCH.end_step()
    check(kind, everyone(WATCH.taken()))


def every_kind_under_ddp():
    for kind in KINDS:
        under_ddp(kind)


def every_kind_under_fsdp():
    for kind in KINDS:
        under_fsdp(kind)


CASES = [every_kind_under_ddp, every_kind_under_fsdp]

if __name__ == "__main__":
    with process_group(60):
        run(CASES)
