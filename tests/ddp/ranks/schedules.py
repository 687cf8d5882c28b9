"""One rank: theta follows every kind of schedule under DDP and FSDP2."""

import torch
from cases import RANKS, assert_equal, everyone, hooked, loss_of, net, weights_of
from schedule_kinds import KINDS, Watch, check
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sn_compress import FFTCompression
from sn_compress.torch.fsdp import compress_replicas

STEPS, HALF = 14, 7
WATCH = None


def start():
    global WATCH
    WATCH = Watch()


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


def every_kind_under_ddp():
    """In one run, and in two halves: a run that goes on is the run that never stopped."""
    for kind, schedule in KINDS.items():
        compression = FFTCompression.using(theta=schedule)
        ddp, _ = hooked(net(), compression)
        train(ddp, range(STEPS))
        check(kind, everyone(WATCH.taken()))
        whole = weights_of(ddp)
        half, state = hooked(net(), compression)
        train(half, range(HALF))
        again, resumed = hooked(half.module, compression)
        resumed.load_state_dict(state.state_dict())
        train(again, range(HALF, STEPS))
        check(kind, everyone(WATCH.taken()))
        assert_equal(again.parameters(), whole, f"{kind}: the resumed run differs")


def every_kind_under_fsdp():
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    for kind, schedule in KINDS.items():
        model = net()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["shard"])
        compress_replicas(model, FFTCompression.using(theta=schedule), mesh["replicate"])
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, step).backward()
            WATCH.end_step()
        check(kind, everyone(WATCH.taken()))


CASES = [every_kind_under_ddp, every_kind_under_fsdp]
