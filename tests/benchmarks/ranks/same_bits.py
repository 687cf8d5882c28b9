"""One rank of two: train under real Horovod, then again with both ranks simulated; compare bits.

Prints "ok EXCHANGE" on every rank, or fails with an assertion.
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from nets import NETS
from simulated import Gather, Plain, Shared, exchange_gradients, rank_gradients

from sn_compress import FFTCompression, LowRankCompression

RANKS, BATCH, STEPS = 2, 4, 8
WAYS = {
    "gather": FFTCompression.using(theta=0.98),
    # Two steps dense at the start and one at the seventh; the others send factors.
    "shared": LowRankCompression.using(ratio=30.0, warmup=2, every=5),
}


def new(seed=0):
    torch.manual_seed(seed)
    net = NETS["cnn"]()
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield (
            torch.randn(RANKS, BATCH, 1, 28, 28, generator=generator),
            torch.randint(0, 10, (RANKS, BATCH), generator=generator),
        )


def real(way):
    net, optimizer = new()
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=WAYS[way],
    )
    for images, labels in batches():
        optimizer.zero_grad()
        x, y = images[hvd.rank()], labels[hvd.rank()]
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def exchange_of(way, sessions, name, parameter):
    if way == "shared":  # a session counts what it does not take
        takes = [session.takes(name, parameter.shape) for session in sessions]
        return Shared(sessions, name, tuple(parameter.shape)) if all(takes) else Plain()
    if not WAYS[way].settings.compresses(parameter.shape):
        return Plain()
    codecs = [WAYS[way].settings.codec(threads=1) for _ in range(RANKS)]
    return Gather(codecs)


def simulated(way):
    net, optimizer = new()
    settings = WAYS[way].settings
    sessions = [settings.shared() for _ in range(RANKS)]
    exchanges = {n: exchange_of(way, sessions, n, p) for n, p in net.named_parameters()}
    for images, labels in batches():
        gradients, _ = rank_gradients(net, images, labels)
        exchange_gradients(net, gradients, exchanges)
        optimizer.step()
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    start = dict(new()[0].named_parameters())
    for way in WAYS:
        ours = dict(simulated(way).named_parameters())
        for name, parameter in real(way).named_parameters():
            assert torch.equal(parameter, ours[name]), f"{way}: {name} differs"
            assert not torch.equal(parameter, start[name]), f"{way}: {name} did not move"
        print(f"ok {way}", flush=True)
