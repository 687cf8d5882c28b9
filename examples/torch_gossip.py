"""Fashion-MNIST by gossip on any number of ranks: one partner per step, samples passed on.

horovodrun -np 2 python examples/torch_gossip.py --codec
"""

import argparse
import gzip
import os
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from sn_compress import codec
from sn_compress.torch.gossip import GossipOptimizer, ring_shuffle

CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--topology", default="dissemination")
flags.add_argument("--codec", action="store_true", help="send differences, 2 % of the values")
flags.add_argument("--epochs", type=int, default=4)
flags.add_argument("--limit", type=int, help="use the first LIMIT images")
flags.add_argument("--data", help="folder of the four .gz files; scripts/fetch_fashion_mnist.py")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8."""
    folder = Path(args.data or os.environ.get("FASHION_MNIST_DIR") or CACHE)
    raw = bytearray(gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes()))
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return torch.frombuffer(raw, dtype=torch.uint8, offset=4 + 4 * raw[3]).view(shape)[: args.limit]


hvd.init()
torch.set_num_threads(1)
x, test_x = (read(f"{part}-images-idx3")[:, None] for part in ("train", "t10k"))
y, test_y = (read(f"{part}-labels-idx1").long() for part in ("train", "t10k"))

conv = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
conv += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
model = nn.Sequential(*conv, nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
topk = codec("topk", theta=0.98) if args.codec else None
opt = GossipOptimizer(opt, topology=args.topology, codec=topk)

mine = slice(hvd.rank(), None, hvd.size())  # this rank's shard; batches move around the ring
batches = ring_shuffle(x[mine], y[mine], batch_size=64)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(batches))
for epoch in range(args.epochs):
    for images, labels in batches:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(images / 127.5 - 1), labels)
        loss.backward()
        opt.step()
        schedule.step()
    spread = opt.spread or 0.0
    opt.consensus()  # test the mean of all ranks
    with torch.inference_mode():
        answers = torch.cat([model(part / 127.5 - 1).argmax(1) for part in test_x.split(500)])
    if hvd.rank() == 0:
        accuracy = 100 * (answers == test_y).double().mean().item()
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.2f} %, spread {spread:.4f}")
if hvd.rank() == 0 and hvd.size() > 1:
    dense = 4 * sum(p.numel() for p in model.parameters())
    sent = opt.report()["bytes_per_step"]
    print(f"{sent / 1e6:.3f} MB a step, {dense / sent:.1f} times fewer than the model has")
