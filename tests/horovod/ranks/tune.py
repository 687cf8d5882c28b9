"""One rank: train with AutoCompression; the clock says that it pays, or that it does not."""

import logging
from dataclasses import replace
from functools import partial

import horovod.torch as hvd
import torch
from torch import nn

import sn_compress.prediction.tuning as tuning
from sn_compress import AutoCompression
from sn_compress.prediction.cost import step as step_of
from sn_compress.prediction.rates import FREE
from sn_compress.torch import horovod as rim
from sn_compress.torch.under_horovod.memory import memory_of

STEPS = 40
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("sn_compress.prediction.tuning").addHandler(handler)
logging.getLogger("sn_compress.prediction.tuning").setLevel(logging.INFO)


class Clock:
    """Each step of this training takes as long as it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


def train_on(model, optimizer, memory, clock, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        clock.now += 2.0 if memory.engine.tuner.choice != "plain" else 1.0


def watch_plain_for_good(way, model, optimizer, memory, clock):
    """Counted as before, and never tried again; a state that is loaded changes nothing of it."""
    before = AutoCompression.report(optimizer)
    assert before["steps"] == STEPS
    train_on(model, optimizer, memory, clock, 20)
    report = AutoCompression.report(optimizer)
    assert report["steps"] == STEPS + 20
    assert report["dense_bytes"] == before["dense_bytes"]
    AutoCompression.load_state_dict(optimizer, AutoCompression.state_dict(optimizer))
    train_on(model, optimizer, memory, clock, 3)
    assert AutoCompression.report(optimizer)["low_rank"] == 0


def train(way, trial_s):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=way,
    )
    clock, memory = Clock(), memory_of(optimizer)
    if trial_s is not None:
        memory.engine.tuner = tuning.Tuner(
            way.settings,
            ranks=hvd.size(),
            total=partial(rim.total, memory, hvd.global_process_set),
            rates=FREE,
            clock=clock,
        )
    torch.manual_seed(1 + hvd.rank())
    seen = set()
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(8, 64), torch.randint(0, 10, (8,))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        chosen = memory.engine.tuner.choice
        seen.add(chosen)
        clock.now += trial_s if trial_s and chosen != "plain" else 1.0
    if trial_s is not None and trial_s > 1:
        watch_plain_for_good(way, model, optimizer, memory, clock)
    assert memory.engine.tuner.settled
    for value in model.state_dict().values():
        everywhere = hvd.allgather(value.reshape(1, -1))
        assert torch.equal(everywhere[:1].expand_as(everywhere), everywhere)
    return memory, seen


def free(routes, **how):
    """A step in which what is compressed takes no time: so it is tried."""
    found = step_of(routes, **how)
    plain = all(route.method == "plain" for route in routes)
    return found if plain else replace(found, seconds=0.0)


hvd.init()
way = AutoCompression
lines.clear()
memory, _ = train(way, None)  # a real clock: nobody knows what it says
assert len([line for line in lines if "predicted" in line]) == 1, lines

tuning.step = free
lines.clear()
memory, seen = train(way, 0.5)
assert "shared" in seen
assert memory.engine.exchange.remembers("0.weight")
assert "500.0 ms a step, 1000.0 ms plain" in lines[-1], lines

memory, seen = train(way, 2.0)
assert "shared" in seen
assert not memory.engine.exchange.remembers("0.weight"), (
    "what was left went along with a plain step"
)
assert "plain Horovod is faster here" in lines[-1], lines
assert memory.engine.traffic.report()["low_rank"] == 0
print("ok", flush=True)
