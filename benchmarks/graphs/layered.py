"""Random layered graphs, in the manner of Gagrani et al. (2022), as training graphs.

Real nets are mostly chains with skips; planners tuned to them can hide a wrong idea. Here each node
sits in a random layer, reads at least one node of the layer before and some of earlier layers, and
has a random size and price. The backward op of a node reads its gradient and some of its forward
operands, at random, so that every kind of dependency occurs.
"""

from __future__ import annotations

import random

from .device import V100_LIKE
from .net import Net, Tensor


def layered(
    nodes: int, *, seed: int, width: int = 4, skips: float = 0.3, largest: int = 1 << 20
) -> Net:
    """Return a training graph with `nodes` forward ops.

    Parameters
    ----------
    width : int
        Layers have 1 to `width` nodes.
    skips : float in [0, 1)
        Chance of one more edge, from any earlier node, drawn again until it fails.
    largest : int
        Elements of the largest tensor; sizes are log-uniform from 1 up to it.
    """
    draw = random.Random(seed)
    net = Net(f"layered-{nodes}-{seed}", 1, device=V100_LIKE)
    previous, before = [net.input(draw.randint(1, largest))], []
    left = nodes
    while left:
        layer = []
        for _ in range(min(left, draw.randint(1, width))):
            parents = [draw.choice(previous)]
            while before and draw.random() < skips:
                parents.append(draw.choice(before))
            layer.append(_mix(net, draw, list(dict.fromkeys(parents)), largest))
            left -= 1
        before += previous
        previous = layer
    read = {name for op in net.ops for name in op.inputs}
    ends = [x for x in [*before, *previous] if x.needs_grad and x.storage not in read]
    return net.finish(_mix(net, draw, ends, 1), "none")


def _mix(net: Net, draw: random.Random, parents: list[Tensor], largest: int) -> Tensor:
    name = net.layer("mix")
    out = net.new(name, int(largest ** draw.random()))
    # Some ops are dear for their size, as convolutions are, and some cheap, as ReLU is.
    flops = sum(p.size for p in (*parents, out)) * 10 ** draw.uniform(0, 4)
    kind = draw.choice(["conv", "bn", "relu", "linear"])
    net.run(name, kind, parents, [out], flops=flops)
    kept = [p for p in (*parents, out) if draw.random() < 0.5]

    def backward(grad: str) -> None:
        wanted = [p for p in parents if p.needs_grad]
        gradients = [net.grad(p, f"{name}.back") for p in wanted]
        net.run(f"{name}.back", f"{kind}_backward", [grad, *kept], gradients, flops=2 * flops)
        for p, g in zip(wanted, gradients, strict=True):
            net.send(p, g)

    net.record(out, backward)
    return out
