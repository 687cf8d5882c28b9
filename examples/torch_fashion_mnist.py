"""Fashion-MNIST on any number of ranks: Horovod's torch recipe, our lines marked `# <- sn`.

horovodrun -np 2 python examples/torch_fashion_mnist.py --compression fft
"""

import argparse
import gzip
import json
import os
import time
import urllib.request
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from tqdm import tqdm

import sn_memory.torch  # <- sn
from sn_compress import AutoCompression, FFTCompression, LowRankCompression  # <- sn

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of `apt-get install dataset-fashion-mnist`
CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"
URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
HELP = "give a folder that holds it with --data, or apt-get install dataset-fashion-mnist"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
WAYS = ["none", "fp16", "fft", "lowrank", "auto"]
flags.add_argument("--compression", choices=WAYS, default="none")
flags.add_argument("--ratio", type=float, default=100, help="lowrank, auto: x fewer bytes")
flags.add_argument("--theta", type=float, default=0.9, help="fft: share of the spectrum dropped")
flags.add_argument("--block", type=int, default=4096, help="fft: block; 0: the whole gradient")
flags.add_argument("--budget", help="memory of a step, such as 80%% or 20MiB; default: no plan")
flags.add_argument("--epochs", type=int, default=4)
flags.add_argument("--stop", type=int, help="stop after this many of these epochs")
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--limit", type=int, help="use the first LIMIT images, at least 64 per rank")
flags.add_argument("--data", help="folder of the four .gz files; or set FASHION_MNIST_DIR")
flags.add_argument("--history", help="JSON file to which rank 0 writes the history")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8; fetch it if it is missing."""
    named = args.data or os.environ.get("FASHION_MNIST_DIR")
    path = Path(named or (DEBIAN if DEBIAN.is_dir() else CACHE)) / f"{name}-ubyte.gz"
    try:
        if not named and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part, _ = urllib.request.urlretrieve(URL + path.name, f"{path}.{os.getpid()}")
            os.replace(part, path)  # an interrupted download leaves nothing under this name
        raw = bytearray(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError) as error:
        raise SystemExit(f"cannot read {path}: {error}; {HELP}") from None
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return torch.frombuffer(raw, dtype=torch.uint8, offset=4 + 4 * raw[3]).view(shape)[: args.limit]


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1000 * args.seed + hvd.rank())  # each rank has its own dropout
x, test_x = (read(f"{part}-images-idx3")[:, None] / 127.5 - 1 for part in ("train", "t10k"))
y, test_y = (read(f"{part}-labels-idx1").long() for part in ("train", "t10k"))
steps = len(x) // (64 * hvd.size())  # 64 images per rank and step; the remainder is dropped

conv = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
conv += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
model = nn.Sequential(*conv, nn.Linear(1568, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if args.budget:  # <- sn
    model = sn_memory.torch.plan(model, x[:64], args.budget, profile=False)  # <- sn
fft = FFTCompression.using(theta=args.theta, block=args.block or None)  # <- sn
low = LowRankCompression.using(ratio=args.ratio)  # <- sn
ours = {"fft": fft, "lowrank": low, "auto": AutoCompression.using(ratio=args.ratio)}  # <- sn
codecs = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, **ours}
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
opt = hvd.DistributedOptimizer(opt, model.named_parameters(), codecs[args.compression])
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * steps)

shuffle = torch.Generator().manual_seed(args.seed)  # the same order on all ranks
seen = {**vars(args), "ranks": hvd.size(), "seconds": 0.0, "loss": [], "accuracy": []}
for epoch in range(args.stop or args.epochs):
    order = torch.randperm(len(x), generator=shuffle)[: steps * hvd.size() * 64]
    mine = order.view(steps, hvd.size(), 64)[:, hvd.rank()]
    for rows in tqdm(mine, f"epoch {epoch + 1}/{args.epochs}", disable=hvd.rank() > 0):
        start = time.perf_counter()
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        opt.step()
        cosine.step()
        seen["seconds"] += time.perf_counter() - start
        seen["loss"].append(loss.item())
    if hvd.rank() == 0:
        with torch.inference_mode():
            answers = torch.cat([model.eval()(part).argmax(1) for part in test_x.split(500)])
        seen["accuracy"].append(100 * (answers == test_y).double().mean().item())
        model.train()
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {seen['accuracy'][-1]:.2f} %")
if args.history and hvd.rank() == 0:
    values = sum(p.numel() for p in model.parameters())
    half = args.compression == "fp16"
    seen |= {"dense_bytes": 4 * values, "payload_bytes": values * (2 if half else 4)}
    if args.compression in ours:  # <- sn
        seen |= ours[args.compression].report(opt)  # <- sn
    if args.budget:  # <- sn
        plan = model.sn_memory.plan  # <- sn
        seen |= {"peak_bytes": plan.peak_bytes, "unplanned_bytes": plan.baseline_peak_bytes}
    Path(args.history).write_text(json.dumps(seen))
