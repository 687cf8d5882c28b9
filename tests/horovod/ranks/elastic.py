"""One worker of an elastic run that loses a rank, by low rank.

kept : rank 2 of 3 kills itself in mid-step; the other two go on from the last commit, each with the
    mean of the memories that are left
replaced : rank 1 of 2 does, memories are not kept, and another one takes its place
"""

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from nets import assert_alike, batch, wrap
from torch import nn

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch.under_horovod.memory import memory_of

KEPT = sys.argv[1] == "kept"
hvd.init()
torch.set_num_threads(1)
committed = []
torch.manual_seed(0)
model = nn.Linear(96, 64)
optimizer = wrap(model, LowRankCompression.using(warmup=4, ratio=20), lr=0.05)


def memories():
    """This rank's memory of the weight."""
    return torch.from_numpy(memory_of(optimizer).engine.exchange.residual("weight"))


def is_to_die():
    """Whether it is this rank that ends in the next step."""
    if KEPT:
        return hvd.size() == 3 and os.environ["HOROVOD_HOSTNAME"] != "localhost"
    mark = Path(sys.argv[2])
    return hvd.rank() == 1 and not mark.exists() and not mark.write_text("")


@hvd.elastic.run
def train(state):
    if KEPT and hvd.size() == 2 and state.step:
        # Committed by all three: the memories of the two that are left.
        before = committed[-1]
        both = hvd.allgather(before[None], name="before")
        assert torch.allclose(memories(), both.mean(0), atol=1e-5 * both.abs().max())
        print(f"ok memories at step {state.step}", flush=True)
    while state.step < 30:
        # Of two, after a commit: what stays is ahead of what comes.
        if state.step == (15 if KEPT else 17) and is_to_die():
            model.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        model(batch(state.step, 8, 96)).square().mean().backward()
        optimizer.step()
        called = LowRankCompression.using(warmup=2)
        hvd.allreduce(model.weight.detach(), name="called", compression=called)
        state.step += 1
        if state.step % 5 == 0:
            if hvd.size() == 3:
                committed.append(memories())
            state.commit()
    assert_alike(model)
    print(f"ok ended with {hvd.size()} ranks", flush=True)


memory = {"memory": FFTCompression.elastic(optimizer)} if KEPT else {}
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, **memory)
train(state)
