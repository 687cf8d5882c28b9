"""One rank: train under real Horovod, then again with all ranks simulated; compare bits.

Prints "ok EXCHANGE" on every rank, or fails with an assertion.
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from nets import NETS
from simulated import Frequencies, Plain, Shared, exchange_gradients, rank_gradients

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.engine.engine import Engine

BATCH, STEPS = 4, 8
WAYS = {
    # Gathered by two ranks, by way of owners among three.
    "frequencies": FFTCompression.using(theta=0.98, min_elements=1),
    # Two steps dense at the start and one at the seventh; the others send factors.
    "shared": LowRankCompression.using(ratio=30.0, warmup=2, every=5),
}


def new(seed=0):
    torch.manual_seed(seed)
    # Three ranks have no order in which Horovod sums: then nothing travels plain.
    net = NETS["cnn"]() if hvd.size() == 2 else matrices()
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def matrices():
    first, second = nn.Linear(784, 64, bias=False), nn.Linear(64, 10, bias=False)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield (
            torch.randn(hvd.size(), BATCH, 1, 28, 28, generator=generator),
            torch.randint(0, 10, (hvd.size(), BATCH), generator=generator),
        )


def real(way):
    net, optimizer = new()
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), compression=WAYS[way]
    )
    for images, labels in batches():
        optimizer.zero_grad()
        x, y = images[hvd.rank()], labels[hvd.rank()]
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def exchange_of(way, sessions, engines, name, parameter):
    if way == "shared":  # a session counts what it does not take
        takes = [session.takes(name, parameter.shape) for session in sessions]
        return Shared(sessions, name, tuple(parameter.shape)) if all(takes) else Plain()
    if not WAYS[way].settings.compresses(parameter.shape):
        return Plain()
    return Frequencies(engines, name, tuple(parameter.shape))


def simulated(way):
    net, optimizer = new()
    settings = WAYS[way].settings
    sessions = [AllReduceExchange(**settings.shared) for _ in range(hvd.size())]
    engines = [
        Engine(settings, 1, stock="Horovod", tuner=None, drops_unused=False)
        for _ in range(hvd.size())
    ]
    # In the order of Horovod's bucket, which is that of the backward pass.
    exchanges = {
        n: exchange_of(way, sessions, engines, n, p)
        for n, p in reversed(list(net.named_parameters()))
    }
    for images, labels in batches():
        gradients, _ = rank_gradients(net, images, labels)
        exchange_gradients(net, gradients, exchanges)
        optimizer.step()
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    start = dict(new()[0].named_parameters())
    for way in list(WAYS)[: 4 - hvd.size()]:
        ours = dict(simulated(way).named_parameters())
        for name, parameter in real(way).named_parameters():
            assert torch.equal(parameter, ours[name]), f"{way}: {name} differs"
            assert not torch.equal(parameter, start[name]), f"{way}: {name} did not move"
        print(f"ok {way}", flush=True)
