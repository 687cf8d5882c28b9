"""One rank of a run that cannot go on: `fail.py kill|join`."""

import os
import signal
import sys

import horovod.torch as hvd
import torch
from torch import nn

from sn_compress import FFTCompression

torch.set_num_threads(1)
hvd.init()
model = nn.Linear(256, 256)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=FFTCompression,
)
for step in range(1000):
    if hvd.rank() == 1 and step == 5:
        if sys.argv[1] == "kill":
            # In mid-step: the payload of the bias is on its way, that of the weight is not.
            model.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        else:
            hvd.join()
            sys.exit(0)
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    if step == 4:
        print("reached step 5", flush=True)
print("all steps done", flush=True)
