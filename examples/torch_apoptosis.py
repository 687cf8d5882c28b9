"""Fashion-MNIST with a network that is too wide, and shrinks while it trains.

    python examples/torch_apoptosis.py --compare

With --compare the same network is also trained without apoptosis. At the end the small model is
exported, rebuilt from the wide one's code, and tested again.
"""

import argparse
import gzip
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from sn_memory.apoptosis.torch import Apoptosis, rebuild  # <- sn

CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--width", type=int, default=1024, help="neurons in each of two hidden layers")
flags.add_argument("--tolerance", type=float, default=0.02, help="change allowed per event")
flags.add_argument("--every", type=int, default=100, help="steps between examinations")
flags.add_argument("--epochs", type=int, default=4)
flags.add_argument("--limit", type=int, help="use the first LIMIT images")
flags.add_argument("--steady", action="store_true", help="examine by steps, not by the clock")
flags.add_argument("--compare", action="store_true", help="train without apoptosis, too")
flags.add_argument("--data", help="folder of the four .gz files; scripts/fetch_fashion_mnist.py")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8."""
    folder = Path(args.data or os.environ.get("FASHION_MNIST_DIR") or CACHE)
    raw = bytearray(gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes()))
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return torch.frombuffer(raw, dtype=torch.uint8, offset=4 + 4 * raw[3]).view(shape)[: args.limit]


def network():
    torch.manual_seed(0)
    wide = args.width
    hidden = [nn.Linear(784, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(wide, 10))


def accuracy(model):
    with torch.inference_mode():
        answers = torch.cat([model.eval()(part).argmax(1) for part in test_x.split(500)])
    model.train()
    return 100 * (answers == test_y).double().mean().item()


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def train(shrinking):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    apoptosis = None
    if shrinking:
        settings = {"tolerance": args.tolerance, "every": args.every}
        if args.steady:
            settings["overhead"] = None  # the same intervals on every machine
        apoptosis = Apoptosis(model, optimizer, **settings)  # <- sn
    seconds = 0.0
    for epoch in range(args.epochs):
        shuffle = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(len(x), generator=shuffle).split(64):
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if shrinking and (event := apoptosis.step()):  # <- sn
                for one in event.merged:
                    print(f"step {event.step}: {one.group} {one.before} -> {one.after} neurons")
            seconds += time.perf_counter() - start
        print(f"epoch {epoch + 1}: {accuracy(model):.2f} %, {size(model):,} parameters")
    return model, apoptosis, seconds


x, test_x = (read(f"{part}-images-idx3") / 127.5 - 1 for part in ("train", "t10k"))
y, test_y = (read(f"{part}-labels-idx1").long() for part in ("train", "t10k"))
if args.compare:
    plain, _, seconds = train(False)
    print(f"without: {accuracy(plain):.2f} %, {size(plain):,} parameters, {seconds:.1f} s")
model, apoptosis, seconds = train(True)
print(f"with apoptosis: {accuracy(model):.2f} %, {size(model):,} parameters, {seconds:.1f} s")
with tempfile.TemporaryDirectory() as folder:
    apoptosis.export(Path(folder) / "small.pt")  # <- sn
    again = rebuild(network(), Path(folder) / "small.pt")  # <- sn
assert accuracy(again) == accuracy(model)
print(f"exported and rebuilt: {accuracy(again):.2f} %")
