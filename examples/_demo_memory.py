"""The demo's second part: a network that does not fit under a memory limit, and with a plan does.

    python examples/_demo_memory.py plain|planned JSON-FILE --limit BYTES

The limit is RLIMIT_DATA: what a process may have of memory of its own, not counting the files it
has mapped, such as torch's libraries. The kernel refuses more, for every user and in a container
too. What the process has is read from the kernel every few milliseconds.
"""

import argparse
import json
import resource
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import nets

import sn_memory.torch


def held_bytes():
    """What RLIMIT_DATA counts, of this process, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/self/status does not tell VmData: no Linux?")


class Watch(threading.Thread):
    """Notes seconds and bytes until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.curve, self.began, self.over = [], time.perf_counter(), threading.Event()

    def run(self):
        while not self.over.wait(0.01):
            self.curve.append((time.perf_counter() - self.began, held_bytes()))


class Classifier(nn.Module):
    """Narrow convolutions at full resolution: little to compute, much to keep; and its loss."""

    def __init__(self, depth, width=16):
        super().__init__()
        layers, channels = [], 1
        for _ in range(depth):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            channels = width
        tail = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(width * 49, 10)]
        self.layers = nn.Sequential(*layers, *tail)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.layers(images), labels)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("way", choices=["plain", "planned"])
    flags.add_argument("out", type=Path)
    flags.add_argument("--limit", type=int, help="most bytes; without it all there is")
    flags.add_argument("--beside", type=int, default=0, help="bytes that are no tensors")
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--batch", type=int, default=256)
    flags.add_argument("--depth", type=int, default=20)
    args = flags.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A copy of those that are trained on, and the others are gone.
    images, labels = (it[: args.steps * args.batch].clone() for it in nets.fashion_mnist("train"))
    model = Classifier(args.depth)
    parts = list(zip(images.split(args.batch), labels.split(args.batch), strict=True))
    # What is loaded and kept for good by a first step and a first plan is no part of the training.
    tiny = tuple(it[:2] for it in parts[0])
    tried = sn_memory.torch.plan(Classifier(args.depth), tiny, "90%", profile=False)
    tried(*tiny).backward()
    del tried
    told = {"base": held_bytes(), "losses": [], "curve": [], "seconds": [], "ended": None}
    if args.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))
    watch = Watch()
    watch.start()
    try:
        if args.way == "planned":
            room = args.limit - held_bytes() - args.beside
            model = sn_memory.torch.plan(model, parts[0], room, profile=False)
            plan = model.sn_memory.plan
            told |= {"plan_s": time.perf_counter() - watch.began, "overhead": plan.overhead}
            told |= {"peak_bytes": plan.peak_bytes, "plain_bytes": plan.baseline_peak_bytes}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for batch, answers in parts:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = model(batch, answers)
            loss.backward()
            optimizer.step()
            told["losses"].append(loss.item())
            told["seconds"].append(time.perf_counter() - start)
            print(f"step {len(told['losses'])}: loss {loss.item():.3f}", flush=True)
    except (MemoryError, RuntimeError) as error:
        # Anything else that ends it is a fault, and ends this process.
        text = str(error)
        if not isinstance(error, MemoryError) and "memory" not in text.lower():
            raise
        told["ended"] = " ".join(text.split())[-200:] or "out of memory"
    watch.over.set()
    watch.join()
    told["curve"] = watch.curve
    if not args.limit:
        # What a step took beyond its tensors: scratch of kernels, which the planner does not see.
        tensors = sn_memory.torch.estimate(model, parts[0]).step_bytes
        took = max(size for _, size in watch.curve) - told["base"]
        told["beside"] = max(took - tensors, 0)
    args.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
