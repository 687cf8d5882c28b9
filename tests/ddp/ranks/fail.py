"""One rank of a run in which rank 1 is killed in mid-step: `fail.py RANK RANKS FILE [nodes]`.

With "nodes" each two ranks are on a node of their own.
"""

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
if sys.argv[4:] == ["nodes"]:
    os.environ["GROUP_RANK"] = str(RANK // 2)
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS,
    timeout=datetime.timedelta(seconds=10),
)  # fmt: skip
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
ddp.register_comm_hook(CompressionState(FFTCompression), compression_hook)
for step in range(1000):
    if RANK == 1 and step == 5:
        # The second layer's payload is on its way then, the first one's is not.
        model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    model.zero_grad()
    ddp(torch.randn(8, 256)).square().mean().backward()
    if step == 4:
        print("reached step 5", flush=True)
print("all steps done", flush=True)
