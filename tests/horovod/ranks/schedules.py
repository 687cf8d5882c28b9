"""One rank: theta follows every kind of schedule in Horovod's torch.

Run as `schedules.py`; prints "ok KIND" for each on every rank, or fails with an assertion.
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from cases import settle
from torch import nn

from sn_compress import FFTCompression

sys.path.append(str(Path(__file__).parents[2]))
from schedule_kinds import KINDS, Watch, check

STEPS, HALF = 14, 7
WATCH = Watch()


def fresh(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=FFTCompression.using(theta=KINDS[kind]),
        backward_passes_per_step=2,
    )
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        for turn in (2 * step, 2 * step + 1):
            generator = torch.Generator().manual_seed(100 * turn + hvd.rank())
            model(torch.randn(8, 96, generator=generator)).square().mean().backward()
        optimizer.step()
        WATCH.end_step()


hvd.init()
for kind in KINDS:
    settle()
    whole, optimizer = fresh(kind)
    train(whole, optimizer, range(STEPS))
    check(kind, hvd.allgather_object(WATCH.taken()))

    half, optimizer = fresh(kind)
    train(half, optimizer, range(HALF))
    saved, weights = FFTCompression.state_dict(optimizer), half.state_dict()
    again, optimizer = fresh(kind)
    again.load_state_dict(weights)
    FFTCompression.load_state_dict(optimizer, saved)
    train(again, optimizer, range(HALF, STEPS))
    check(kind, hvd.allgather_object(WATCH.taken()))
    same = map(torch.equal, again.parameters(), whole.parameters())
    assert all(same), f"{kind}: the resumed run differs"

    # A rank that comes anew, as in an elastic run, is where the others are.
    late, optimizer = fresh(kind)
    late.load_state_dict(weights)
    if hvd.rank() == 0:
        FFTCompression.load_state_dict(optimizer, saved)
    FFTCompression.synchronize(optimizer)
    train(late, optimizer, range(HALF, STEPS))
    thetas = WATCH.taken()
    assert hvd.allgather_object(thetas) == [thetas] * hvd.size(), f"{kind}: a rank is elsewhere"
    assert thetas == [KINDS[kind].theta(step) for step in range(HALF, STEPS)], kind
    print(f"ok {kind}", flush=True)
