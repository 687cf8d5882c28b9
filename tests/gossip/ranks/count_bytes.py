"""One rank in a namespace of its own: bytes that leave it per step, by way of training.

Run as `count_bytes.py RANK RANKS ADDRESS`; prints a JSON line.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from sn_compress import codec
from sn_compress.gossip.torch import GossipOptimizer

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
STEPS = 6
WAYS = {
    "gossip": {"topology": "dissemination"},
    "exact": {"topology": "exact"},
    "coded": {"codec": codec("topk", theta=0.98)},
    "gradients": {"average": "gradients"},
}

rank, ranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)


def step_of(way):
    torch.manual_seed(0)
    model = nn.Linear(700, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if way != "all-reduce":
        GossipOptimizer(optimizer, overlap=False, every=0, group=dist.group.WORLD, **WAYS[way])

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 700)).square().mean().backward()
        if way == "all-reduce":
            dist.all_reduce(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        optimizer.step()

    return step


found = {"model": 4 * (700 * 700 + 700)}
for way in ("all-reduce", *WAYS):
    step = step_of(way)
    step()  # ranks agree, and connect
    dist.barrier()
    before = int(COUNTER.read_text())
    for _ in range(STEPS):
        step()
    dist.barrier()
    found[way] = (int(COUNTER.read_text()) - before) / STEPS
print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
