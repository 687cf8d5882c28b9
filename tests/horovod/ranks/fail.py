"""One rank of a run that cannot go on: `fail.py kill|join|damage gather|arrays|shared`.

With "arrays" no tensor is taken to be on the host, so payloads are made by array code.
"""

import os
import signal
import sys

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.codecs import fft
from sn_compress.engine import payloads

BAD_STEP = 15  # low rank is dense before step 10

torch.set_num_threads(1)
hvd.init()
what, exchange = sys.argv[1:]
if what == "kill":
    # The launcher ends the others as soon as one is dead: they are to learn it by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
WAYS = {"gather": FFTCompression, "arrays": FFTCompression, "shared": LowRankCompression}
if exchange == "arrays":
    payloads.on_host = fft.on_host = lambda values: isinstance(values, np.ndarray)
model = nn.Linear(256, 256)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=WAYS[exchange],
)


def damaged(send):
    """The collective, with one bit of what this rank sends turned over."""

    def call(tensor, *args, **options):
        name = options.get("name") or (args[1] if args else "")
        # A payload, not the word that counts the ranks of a step.
        if name.startswith("sn") and not name.startswith("sn.ranks."):
            tensor = tensor.clone()
            tensor.view(torch.uint8)[-9] ^= 16
        return send(tensor, *args, **options)

    return call


for step in range(1000):
    if hvd.rank() == 1 and step == BAD_STEP:
        if what == "kill":
            # In mid-step: what is sent of the bias is on its way, that of the weight is not.
            model.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        elif what == "damage":
            if hvd.size() == 2:
                hvd.allgather_async = damaged(hvd.allgather_async)
            hvd.alltoall_async = damaged(hvd.alltoall_async)
            hvd.allreduce_async_ = damaged(hvd.allreduce_async_)
        else:
            hvd.join()
            sys.exit(0)
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    if step == BAD_STEP - 1:
        print("reached the bad step", flush=True)
    if step == BAD_STEP:
        print("finished the bad step", flush=True)
print("all steps done", flush=True)
