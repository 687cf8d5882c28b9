"""First part of the demo: two DDP ranks over a slow link, plain or compressed.

examples/demo.py starts it once per rank, through benchmarks/ddp_ranks.py. Every method trains the
same steps on the same images of Fashion-MNIST; only the communication hook differs.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import ddp_ranks
import nets

import sn_compress
from sn_compress.torch.ddp import CompressionState, compression_hook

BATCH = 64  # images per rank and step
TEST_IMAGES = 2000  # for the accuracy during training; at the end all 10,000
LOCAL_STEPS = 10  # without communication, to measure the time of computing


def network():
    """Return two convolutions and two dense layers: 824,458 parameters, 3.3 MB of gradients."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1568, 512), nn.ReLU(), nn.Linear(512, 10))


def accuracy(model, images, labels):
    """Return the percentage of correctly classified test images."""
    with torch.inference_mode():
        answers = torch.cat([model(part).argmax(1) for part in images.split(500)])
    return 100 * (answers == labels).double().mean().item()


def work(job):
    """Train one rank with one method; the seconds exclude measuring the accuracy."""
    torch.manual_seed(0)
    images, labels = nets.fashion_mnist("train")
    test_images, test_labels = nets.fashion_mnist("t10k")
    model, rank = network(), dist.get_rank()
    ddp, state = DistributedDataParallel(model), None
    if job["compression"]:
        compression = getattr(sn_compress, job["compression"]).using(**job["settings"])
        state = CompressionState(compression, named_parameters=model.named_parameters())
        ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    seconds, computing, curve = [], [], []
    for step in range(job["steps"]):
        mine = order[(2 * step + rank) * BATCH % (len(images) - BATCH) :][:BATCH]
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images[mine]), labels[mine]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        last = step == job["steps"] - 1
        if rank == 0 and (step % job["accuracy_every"] == 0 or last):
            n = len(test_images) if last else TEST_IMAGES
            curve.append((sum(seconds), accuracy(model, test_images[:n], test_labels[:n])))
    for _ in range(LOCAL_STEPS):  # nothing is sent, and the gradients are discarded
        start = time.perf_counter()
        with ddp.no_sync():
            nn.functional.cross_entropy(ddp(images[mine]), labels[mine]).backward()
        computing.append(time.perf_counter() - start)
    report = state.report() if state else {}
    return {"seconds": seconds, "computing": computing, "curve": curve, "report": report}


if __name__ == "__main__" and not ddp_ranks.as_rank(work):
    raise SystemExit("this is part of examples/demo.py; run that instead")
