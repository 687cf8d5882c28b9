"""One rank of a run in which rank 1 is killed in mid-step: `fail.py RANK RANKS FILE [nodes]`.

With "nodes" each two ranks are on a node of their own.
"""

import os
import signal
import sys

import torch
from cases import RANK, process_group, wrap
from torch import nn

from sn_compress import FFTCompression
from sn_compress.torch.ddp import CompressionState

if sys.argv[4:] == ["nodes"]:
    os.environ["GROUP_RANK"] = str(RANK // 2)
with process_group(10):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    ddp = wrap(model, CompressionState(FFTCompression), bucket_cap_mb=0.1)
    for step in range(1000):
        if RANK == 1 and step == 5:
            # The second layer's payload is on its way then, the first one's is not.
            model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        model.zero_grad()
        ddp(torch.randn(8, 256)).square().mean().backward()
        if step == 4:
            print("reached step 5", flush=True)
print("all steps done", flush=True)
