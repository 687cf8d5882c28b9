"""Second part of the demo: a network runs out of memory under a limit, and trains with a plan.

    python examples/_demo_memory.py plain|planned JSON-FILE [--limit BYTES]

The limit is RLIMIT_DATA: the process's private memory, without mapped files such as torch's
libraries. The kernel enforces it for every user, also in a container.
"""

import argparse
import json
import re
import resource
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import nets  # noqa: E402  (a folder that is no package)

import sn_memory.torch  # noqa: E402

MIB = 2**20
# Limits also count what this plan does not: kernels' scratch, and the process's own memory.
# oneDNN may copy each operand of an op into another layout. The backward pass of a convolution has
# three operands as large as an activation: its input, and the gradients of its output and input.
SCRATCH_COPIES = 3
# The plan, kernels compiled for its shapes, and what malloc retains. Twice the measured maximum
# (docs/decisions/0067 has the figures).
PROCESS_BYTES = 64 * MIB
WATCH_S = 0.01  # between two points of the picture's curve, which is only for display
WATCH_STACK = 256 * 1024  # bytes; the default of 8 MiB would show in the curve


def held_bytes():
    """Return the bytes that RLIMIT_DATA counts for this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/self/status has no VmData; the demo needs Linux 4.7 or newer")


class Watch(threading.Thread):
    """Records (seconds, bytes) for the picture until `stop` is called."""

    def __init__(self):
        super().__init__(daemon=True)
        self.curve, self.start_s, self._stopped = [], time.perf_counter(), threading.Event()
        default = threading.stack_size(WATCH_STACK)
        self.start()
        threading.stack_size(default)

    def run(self):
        while not self._stopped.wait(WATCH_S):
            self.curve.append((time.perf_counter() - self.start_s, held_bytes()))

    def stop(self):
        self._stopped.set()
        self.join()
        return self.curve


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


def reserve_bytes(model, images):
    """Return the bytes that a limit must leave in addition to the tensors of a step."""
    activation = images.nbytes * model.layers[0].out_channels  # images have one channel
    return SCRATCH_COPIES * activation + PROCESS_BYTES


def train(model, batches, result):
    """Train on the batches; losses and seconds go into `result` step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        result["losses"].append(loss.item())
        result["seconds"].append(time.perf_counter() - start)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("mode", choices=["plain", "planned"])
    flags.add_argument("out", type=Path)
    flags.add_argument("--limit", type=int, help="bytes; without it there is no limit")
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--batch", type=int, default=256)
    flags.add_argument("--depth", type=int, default=20)
    args = flags.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = nets.fashion_mnist("train")
    # A copy of the images trained on, so that all the others are freed.
    images, labels = (part[: args.steps * args.batch].clone() for part in (images, labels))
    batches = list(zip(images.split(args.batch), labels.split(args.batch), strict=True))
    model = Classifier(args.depth)
    sample = batches[0]
    # What the first plan and the first step import and keep for good is there before the limit.
    tiny = tuple(part[:2] for part in sample)
    first = sn_memory.torch.plan(Classifier(args.depth), tiny, "90%", profile=False)
    first(*tiny).backward()
    del first
    step_bytes = sn_memory.torch.estimate(model, sample).step_bytes
    result = {
        "base": held_bytes(), "step_bytes": step_bytes, "reserve": reserve_bytes(model, sample[0]),
        "losses": [], "seconds": [], "error": None,
    }  # fmt: skip
    if args.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))
    watch = Watch()
    try:
        if args.mode == "planned":
            budget = args.limit - held_bytes() - result["reserve"]
            model = sn_memory.torch.plan(model, sample, budget, profile=False)
            result["peak_bytes"] = model.sn_memory.plan.peak_bytes
        train(model, batches, result)
    except (MemoryError, RuntimeError) as error:
        # Out of memory, or no plan within the budget. All else is a bug and ends the process.
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError | sn_memory.BudgetError) and "memory" not in text:
            raise
        refused = re.search(r"allocate memory.* (\d+) bytes", text)
        result["error"] = (
            f"out of memory, {int(refused[1]):,} bytes were refused" if refused else text[-200:]
        ) or "out of memory"
    result["curve"] = watch.stop()
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
