"""One rank of a run in which another is killed: `fail.py FOLDER horovod|distributed`."""

import os
import signal
import sys

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn

from sn_compress.torch.gossip import GossipOptimizer

BAD_STEP = 5

torch.set_num_threads(1)
hvd.init()
place = {"process_set": hvd.global_process_set}
if sys.argv[2] == "distributed":
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}/store", rank=hvd.rank(), world_size=hvd.size()
    )
    place = {"group": dist.group.WORLD}
model = nn.Linear(256, 256)
optimizer = GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **place)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    if step == BAD_STEP:
        print("reached the bad step", flush=True)
        # The launcher ends the others as soon as one is dead: they are to learn it by themselves.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.step()
    except RuntimeError as error:  # as is HorovodInternalError
        print(f"rank {hvd.rank()} was told: {type(error).__name__}", flush=True)
        # Left to itself, Horovod would wait for the dead rank as it shuts down.
        os._exit(3)
print("all steps done", flush=True)
