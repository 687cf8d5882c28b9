"""One rank of a run in which rank 1 is killed in mid-step: `fail.py gather|shared`."""

import os
import signal
import sys

import horovod.torch as hvd
import torch
from nets import wrap
from torch import nn

from sn_compress import FFTCompression, LowRankCompression

BAD_STEP = 15  # low rank is dense before step 10

torch.set_num_threads(1)
hvd.init()
# The launcher ends the others as soon as one is dead: they are to learn it by themselves.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
model = nn.Linear(256, 256)
optimizer = wrap(model, {"gather": FFTCompression, "shared": LowRankCompression}[sys.argv[1]])
for step in range(1000):
    if hvd.rank() == 1 and step == BAD_STEP:
        # What is sent of the bias is on its way then, that of the weight is not.
        model.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    if step == BAD_STEP - 1:
        print("reached the bad step", flush=True)
    if step == BAD_STEP:
        print("finished the bad step", flush=True)
