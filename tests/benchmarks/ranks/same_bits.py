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
from simulated import SMALLEST, Gather, Plain, exchange_gradients, rank_gradients

import sn_compress
from sn_compress import FFTCompression

RANKS, BATCH, STEPS = 2, 4, 6
THETA = 0.98


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


def real():
    net, optimizer = new()
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=FFTCompression.using(theta=THETA),
    )
    for images, labels in batches():
        optimizer.zero_grad()
        x, y = images[hvd.rank()], labels[hvd.rank()]
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def simulated():
    net, optimizer = new()
    exchanges = {}
    for name, parameter in net.named_parameters():
        codecs = [sn_compress.codec("fft", theta=THETA, threads=1) for _ in range(RANKS)]
        exchanges[name] = Gather(codecs) if parameter.numel() >= SMALLEST else Plain()
    for images, labels in batches():
        gradients, _ = rank_gradients(net, images, labels)
        exchange_gradients(net, gradients, exchanges)
        optimizer.step()
    return net


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    start = dict(new()[0].named_parameters())
    ours = dict(simulated().named_parameters())
    for name, parameter in real().named_parameters():
        assert torch.equal(parameter, ours[name]), f"{name} differs"
        assert not torch.equal(parameter, start[name]), f"{name} did not move"
    print("ok gather", flush=True)
