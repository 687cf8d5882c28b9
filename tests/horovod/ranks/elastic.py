"""One worker of an elastic run that loses a rank, by low rank.

Rank 2 of 3 kills itself in mid-step; the other two go on from the last commit, each with the mean
of the memories that are left.
"""

import os
import signal

import horovod.torch as hvd
import torch
from nets import assert_alike, batch, wrap
from torch import nn

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch.under_horovod.memory import memory_of

hvd.init()
torch.set_num_threads(1)
committed = []
torch.manual_seed(0)
model = nn.Linear(96, 64)
optimizer = wrap(model, LowRankCompression.using(warmup=4, ratio=20), lr=0.05)


def memories():
    """This rank's memory of the weight."""
    return torch.from_numpy(memory_of(optimizer).engine.exchange.residual("weight"))


@hvd.elastic.run
def train(state):
    if hvd.size() == 2 and state.step:
        # Committed by all three: the memories of the two that are left.
        before = committed[-1]
        both = hvd.allgather(before[None], name="before")
        assert torch.allclose(memories(), both.mean(0), atol=1e-5 * both.abs().max())
        print(f"ok memories at step {state.step}", flush=True)
    while state.step < 30:
        if state.step == 15 and hvd.size() == 3 and os.environ["HOROVOD_HOSTNAME"] != "localhost":
            model.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        model(batch(state.step, 8, 96)).square().mean().backward()
        optimizer.step()
        state.step += 1
        if state.step % 5 == 0:
            if hvd.size() == 3:
                committed.append(memories())
            state.commit()
    assert_alike(model)
    print(f"ok ended with {hvd.size()} ranks", flush=True)


state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, memory=FFTCompression.elastic(optimizer), step=0
)
train(state)
