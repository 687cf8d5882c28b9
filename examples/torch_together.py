"""Apoptosis, a memory plan and compressed gradients together: one net on any number of ranks.

horovodrun -np 2 python examples/torch_together.py

The net shrinks while it trains, within a memory budget, and its gradients are sent compressed.
When neurons have merged, Horovod's wrapper and the memory plan are made again; residuals are cut
like the parameters, and kept.
"""

import argparse
import gzip
import os
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import sn_memory.torch  # <- sn
from sn_compress import LowRankCompression  # <- sn
from sn_memory.apoptosis.torch import Apoptosis  # <- sn

CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--width", type=int, default=512, help="neurons in the hidden layer")
flags.add_argument("--tolerance", type=float, default=0.02, help="change allowed per event")
flags.add_argument("--every", type=int, default=50, help="steps between examinations")
flags.add_argument("--budget", default="90%", help="memory of a step, such as 90%% or 20MiB")
flags.add_argument("--ratio", type=float, default=10, help="how many times fewer bytes to send")
flags.add_argument("--epochs", type=int, default=2)
flags.add_argument("--limit", type=int, help="use the first LIMIT images, at least 64 per rank")
flags.add_argument("--steady", action="store_true", help="examine by steps, not by the clock")
flags.add_argument("--data", help="folder of the four .gz files; scripts/fetch_fashion_mnist.py")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8."""
    folder = Path(args.data or os.environ.get("FASHION_MNIST_DIR") or CACHE)
    raw = bytearray(gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes()))
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return torch.frombuffer(raw, dtype=torch.uint8, offset=4 + 4 * raw[3]).view(shape)[: args.limit]


def wrap(budget):
    """Make what depends on parameters and shapes: Horovod's wrapper and the memory plan."""
    compression = LowRankCompression.using(ratio=args.ratio)  # <- sn
    opt = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    opt.state = optimizer.state
    apoptosis.carry = lambda: LowRankCompression.residuals(opt)  # <- sn
    return opt, sn_memory.torch.plan(model, x[:64], budget, profile=False)  # <- sn


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)  # the same net on all ranks
x, test_x = (read(f"{part}-images-idx3")[:, None] / 127.5 - 1 for part in ("train", "t10k"))
y, test_y = (read(f"{part}-labels-idx1").long() for part in ("train", "t10k"))
conv = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
conv += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
model = nn.Sequential(*conv, nn.Linear(1568, args.width), nn.ReLU(), nn.Linear(args.width, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
looks = {"tolerance": args.tolerance, "every": args.every}
if args.steady:
    looks["overhead"] = None  # the same intervals on every machine
apoptosis = Apoptosis(model, optimizer, **looks)  # <- sn
opt, planned = wrap(args.budget)
steps = len(x) // (64 * hvd.size())
for epoch in range(args.epochs):
    shuffle = torch.Generator().manual_seed(epoch)  # the same order on all ranks
    order = torch.randperm(len(x), generator=shuffle)[: steps * hvd.size() * 64]
    for rows in order.view(steps, hvd.size(), 64)[:, hvd.rank()]:
        apoptosis.observe(x[rows])  # <- sn
        loss = nn.functional.cross_entropy(planned(x[rows]), y[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()  # before apoptosis, which may leave gradients for the next step
        if event := apoptosis.step():  # <- sn
            opt, planned = wrap(planned.sn_memory.plan.peak_bytes)  # <- sn
            widths = ", ".join(f"{one.group} {one.before} -> {one.after}" for one in event.merged)
            if hvd.rank() == 0:
                peak = planned.sn_memory.plan.peak_bytes  # <- sn
                print(f"step {event.step}: {widths}; at most {peak / 1e6:.1f} MB a step")
    with torch.inference_mode():
        answers = torch.cat([model.eval()(part).argmax(1) for part in test_x.split(500)])
    model.train()
    if hvd.rank() == 0:
        sent = LowRankCompression.report(opt)["payload_bytes"]  # <- sn
        right = 100 * (answers == test_y).double().mean().item()
        print(f"epoch {epoch + 1}: {right:.2f} %, {sum(p.numel() for p in model.parameters()):,} "
              f"parameters, {sent / 1e3:.0f} kB sent a step")  # fmt: skip
