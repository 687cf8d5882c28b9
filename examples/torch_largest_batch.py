"""Find the largest batch that trains within a memory size, without and with a plan.

    python examples/torch_largest_batch.py [--memory 40MiB]

The search allocates nothing of that size: the plain batch is estimated, and planned ones are
tried on traces. Then one step of the largest planned batch runs, and its memory is measured.
"""

import argparse

import torch
from torch import nn

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.base.sizes import show_bytes


def network(width=24):
    """Return six convolutions with batch norm over images of 32 x 32."""
    layers = [nn.Conv2d(3, width, 3, 1, 1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def sample(batch):
    return torch.empty(batch, 3, 32, 32, device="meta")


def planned(model, images, memory):
    """Plan the model within a memory size, or return None; no op is timed, so nothing runs."""
    try:
        return sn_memory.torch.plan(model, images, memory, profile=False, time_limit_s=5)
    except BudgetError:
        return None


def largest(fits, low):
    """Return the largest number that fits, to a sixteenth: double, then bisect."""
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="40MiB")
    args = parser.parse_args()
    with torch.device("meta"):
        sketch = network()
    plain = sn_memory.torch.estimate(sketch, sample(1)).largest_batch(args.memory)
    batch = largest(lambda size: planned(sketch, sample(size), args.memory) is not None, plain)

    torch.manual_seed(0)
    model, images = network(), torch.randn(batch, 3, 32, 32)
    step = planned(model, images, args.memory)
    result = sn_memory.torch.verify(step, images)
    assert result.equal
    print(
        f"in {args.memory}: {plain} images plainly, {batch} with a plan, "
        f"{batch / plain:.1f} times as many\n"
        f"that step held {show_bytes(result.measured_peak_bytes)}; without the plan "
        f"{show_bytes(result.unplanned_peak_bytes)}; gradients are the same to the bit"
    )


if __name__ == "__main__":
    main()
