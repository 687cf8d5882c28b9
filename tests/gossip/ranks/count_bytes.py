"""Bytes that leave a rank per step, by way of training, at several numbers of ranks.

Run as `count_bytes.py RANKS...`; prints a JSON line for each rank. The ranks are forks of this
process, each in a network namespace of its own: torch is imported once for all of them.
"""

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from shaped_links import ShapedLinks

from sn_compress import codec
from sn_compress.torch.gossip import GossipOptimizer

STEPS = 6
CLONE_NEWNET = 0x40000000
WAYS = {
    "gossip": {"topology": "dissemination"},
    "exact": {"topology": "exact"},
    "coded": {"codec": codec("topk", theta=0.98)},
}


def sent():
    """Bytes that left this namespace; /sys would show those of the one it was mounted in."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise LookupError("there is no eth0 in /proc/self/net/dev")


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


def rank_of(links, rank, name):
    with open(f"/var/run/netns/{name}") as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    address = f"tcp://{links.address(0)}:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=links.ranks)
    found = {"ranks": links.ranks, "model": 4 * (700 * 700 + 700)}
    for way in ("all-reduce", *WAYS):
        step = step_of(way)
        step()  # ranks agree, and connect
        dist.barrier()
        before = sent()
        for _ in range(STEPS):
            step()
        dist.barrier()
        found[way] = (sent() - before) / STEPS
    # One write, so that the lines of two ranks do not mix.
    os.write(1, (json.dumps(found) + "\n").encode())
    dist.barrier()


def run(ranks):
    with ShapedLinks(ranks, None) as links:
        children = []
        names = [links.space(rank) for rank in range(ranks)]  # they carry this process's number
        for rank, name in enumerate(names):
            child = os.fork()
            if not child:
                status = 1
                try:
                    rank_of(links, rank, name)
                    status = 0
                except BaseException:  # noqa: BLE001 - a fork must not run on as its parent
                    traceback.print_exc()
                finally:
                    os._exit(status)  # the namespaces are the parent's to remove
            children.append(child)
        return [os.waitpid(child, 0)[1] for child in children]


torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports half of torch at the first one
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
sys.exit(any(any(run(int(ranks))) for ranks in sys.argv[1:]))
