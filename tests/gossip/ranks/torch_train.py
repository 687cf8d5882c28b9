"""One rank under horovodrun: `torch_train.py FOLDER CASE...`; prints "ok CASE" on every rank.

Horovod and torch.distributed are both there, and every case that compares runs compares them too.
"""

import socket
import sys
import time
import warnings
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from local_peers import Hall
from torch_cases import CASES, World, flat, net, reference, sgd, trained

from sn_compress import CompressError, codec
from sn_compress.gossip import topology
from sn_compress.torch.gossip import GossipOptimizer


def idle_ranks(world):
    """Three ranks of more: one of them sits out in every step of the exact graph.

    The fourth rank makes none of these; all ranks must find together in later ones nevertheless.
    """
    size = min(3, world.size)
    graph = topology("exact", size)
    group = dist.new_group(list(range(size)))
    sets = hvd.add_process_set(list(range(size))) if size < world.size else hvd.global_process_set
    if world.rank < size:
        expected = reference(graph, overlap=True)
        for place in ({"group": group}, {"process_set": sets}):
            model, _ = trained(world, topology=graph, place=place)
            assert torch.equal(flat(model), expected[world.rank])
        if size < world.size:
            with pytest.raises(CompressError, match="another gossip optimizer"):
                GossipOptimizer(sgd(net()), topology=graph, group=group)
    hvd.barrier()


def threads(world):
    """What benchmarks/gossip.py rests on: ranks as threads of one process get the same bits."""
    for settings in (
        {},
        {"topology": "exact", "overlap": False},
        {"codec": codec("topk", theta=0.98), "steps": 40},
        {"codec": codec("fft", theta=0.9, bits=4), "steps": 40},
    ):

        def work(peers, settings=settings):
            alone = World(peers.rank, peers.ranks, [{"group": peers}], peers.gather, world.folder)
            return flat(trained(alone, **settings)[0])

        expected = Hall(world.size).run(work)[world.rank]
        for place in world.places:
            # Messages of the run before are still under way, in the same group.
            model, _ = trained(world, place=place, **settings)
            assert torch.equal(flat(model), expected), settings


def late(world):
    """Who waits for ranks that do not come is told so; the last case, as its messages stay behind.

    Rank 0 makes an optimizer that the others make only when it has given up, and then wait in vain.
    """
    time.sleep(3 * (world.rank > 0))
    with pytest.raises(CompressError, match=r"waited 1 s .* larger wait_s"):
        GossipOptimizer(sgd(net()), wait_s=1, process_set=hvd.global_process_set)


OWN = {"idle-ranks": idle_ranks, "threads": threads, "late": late}

if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = hvd.broadcast_object(free.getsockname()[1], name="port")
    # Not over a file: ranks that wait for one read it again and again, and each group waits.
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size()
    )
    places = [{"process_set": hvd.global_process_set}, {"group": dist.group.WORLD}]
    world = World(hvd.rank(), hvd.size(), places, hvd.allgather_object, Path(sys.argv[1]))
    for case in sys.argv[2:]:
        (OWN | CASES)[case](world)
        print(f"ok {case}", flush=True)
    dist.barrier()
    time.sleep(0.2)  # docs/ddp.md says why
    dist.destroy_process_group()
