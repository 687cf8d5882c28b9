"""Graphs with the layers and phases that planners of the literature look for."""

import random
from dataclasses import replace

from random_graphs import random_graph

from sn_memory import Device, Graph, Op, Storage

KINDS = ["conv2d", "relu", "batch_norm", "add", "", "concat", "linear", "max_pool"]
LANES = Device(to_host_bytes_per_s=10.0, to_device_bytes_per_s=10.0)


def training_graph(seed: int) -> Graph:
    """A random graph, its later ops mostly backward ones, with kinds that policies look for."""
    graph, draw = random_graph(seed, most_ops=20, plain=seed % 2 == 0), random.Random(seed)
    cut = draw.randint(0, len(graph.ops))
    ops = [
        replace(
            op,
            kind=draw.choice(KINDS),
            flops=draw.choice([0.0, 1e3]),
            phase="forward" if (at < cut) ^ (draw.random() < 0.1) else "backward",
        )
        for at, op in enumerate(graph.ops)
    ]
    device = replace(graph.device, pinned_bytes=draw.choice([None, 60]))
    return Graph(graph.storages, ops, name=graph.name, device=device)


def chain(
    layers: int, *, kind: str = "relu", size: int = 10, device: Device | None = None
) -> Graph:
    """f0 .. fn, each backward op reading the input of its layer and the gradient above."""
    storages = [Storage("a0", size, "input"), Storage("loss", 0, keep=True)]
    ops = []
    for at in range(1, layers + 1):
        storages += [Storage(f"a{at}", size), Storage(f"g{at}", size, "gradient")]
        ops.append(Op(f"f{at}", (f"a{at - 1}",), (f"a{at}",), kind=kind, seconds=1.0))
    ops.append(Op("loss", (f"a{layers}",), ("loss",), kind="loss", seconds=1.0))
    ops.append(
        Op("seed", (f"a{layers}",), (f"g{layers}",), kind="loss", phase="backward", seconds=1.0)
    )
    storages.append(Storage("g0", size, "gradient", keep=True))
    back = {"kind": f"{kind}_backward", "phase": "backward", "seconds": 2.0}
    ops += [
        Op(f"b{at}", (f"a{at - 1}", f"g{at}"), (f"g{at - 1}",), **back)
        for at in range(layers, 0, -1)
    ]
    return Graph(storages, ops, name=f"chain {layers}", device=device or Device())
