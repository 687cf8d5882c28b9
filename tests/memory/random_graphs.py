"""Random small graphs that use everything the format can say, and chains as training has them."""

import numpy as np

from sn_memory import Device, Graph, Op, Storage, Workspace
from sn_memory.graph.liveness import peak

DEVICE = Device(to_host_bytes_per_s=40.0, to_device_bytes_per_s=40.0, transfer_latency_s=0.1)
FLAGS = ("random", "replayable", "effect", "collective", "once", "fixed")


def budget_of(graph: Graph, share: float) -> int:
    """Bytes that leave what ops make this share of what it takes at the peak."""
    return graph.base_bytes + int((peak(graph).bytes - graph.base_bytes) * share)


def random_graph(seed: int, *, most_ops: int = 12, plain: bool = False) -> Graph:
    """A random graph of at most `most_ops` ops; `plain` leaves flags, writes and workspaces out."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_ops + 1))
    storages = [Storage("x", int(rng.integers(0, 20)), "input"), Storage("w", 7, "parameter")]
    alive, ops = ["x", "w"], []
    for number in range(count):
        # Recent storages are likelier inputs, as in a network; old ones make the holes.
        weights = np.linspace(1, 3, len(alive))
        size = min(len(alive), int(rng.integers(0, 4)))
        drawn = rng.choice(alive, size, replace=False, p=weights / weights.sum())
        inputs = [str(it) for it in drawn]
        outputs, writes, flags, spaces = [], [], {}, ()
        for _ in range(int(rng.choice([0, 1, 1, 1, 2]))):
            name = f"s{len(storages)}"
            keep = bool(rng.random() < 0.1)
            # Not drawn, so that the graphs are those they were before storages could be held.
            held = not plain and len(storages) % 4 == 0
            storages.append(Storage(name, int(rng.integers(0, 50)), keep=keep, held=held))
            outputs.append(name)
        if not plain:
            if rng.random() < 0.15:
                writes = [inputs.pop()] if inputs else ["w"]
            flags = {flag: True for flag in FLAGS if rng.random() < 0.06}
            if rng.random() < 0.2:
                spaces = (
                    Workspace(int(rng.integers(0, 30)), float(rng.integers(1, 5))),
                    Workspace(0, float(rng.integers(5, 9))),
                )
        alive += outputs
        seconds = None if spaces else float(rng.integers(1, 10))
        names = (tuple(it) for it in (inputs, outputs, writes))
        ops.append(Op(f"op{number}", *names, seconds=seconds, workspaces=spaces, **flags))
    return Graph(storages, ops, name=f"random {seed}", device=DEVICE)


def training_chain(layers: int, *, seed: int = 0, act: int = 100) -> Graph:
    """Layers of an expensive and a cheap op, loss, and their backward ops in reverse."""
    rng = np.random.default_rng(seed)
    storages = [Storage("x", 10, "input"), Storage("w", 40, "parameter")]
    forward, backward = [], []
    for at in range(layers):
        size = int(act * rng.uniform(0.5, 1.5))
        storages += [Storage(f"c{at}", size), Storage(f"a{at}", size)]
        storages += [Storage(f"dc{at}", size, "gradient"), Storage(f"da{at}", size, "gradient")]
        below, gradient = (f"a{at - 1}", f"da{at - 1}") if at else ("x", "dx")
        forward += [
            Op(f"conv{at}", (below, "w"), (f"c{at}",), kind="conv", seconds=10.0),
            Op(f"act{at}", (f"c{at}",), (f"a{at}",), kind="act", seconds=1.0),
        ]
        backward += [
            Op(f"dconv{at}", (below, f"dc{at}", "w"), (gradient,), phase="backward", seconds=20.0),
            Op(f"dact{at}", (f"c{at}", f"da{at}"), (f"dc{at}",), phase="backward", seconds=1.0),
        ]
    last = layers - 1
    storages += [Storage("loss", 1, keep=True), Storage("dx", 10, "gradient", keep=True)]
    forward.append(Op("loss", (f"a{last}",), ("loss",), seconds=1.0))
    backward.append(Op("dloss", (f"a{last}",), (f"da{last}",), phase="backward", seconds=1.0))
    return Graph(storages, [*forward, *reversed(backward)], name=f"chain {layers}")
