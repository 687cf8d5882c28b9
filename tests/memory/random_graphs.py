"""Random small graphs that use everything the format can say, and the brute force for liveness."""

import numpy as np

from sn_memory import Device, Graph, Op, Storage, Workspace

DEVICE = Device(to_host_bytes_per_s=40.0, to_device_bytes_per_s=40.0, transfer_latency_s=0.1)


def random_graph(seed: int, *, most_ops: int = 12, plain: bool = False) -> Graph:
    """A random graph of at most `most_ops` ops; `plain` leaves flags, writes and workspaces out."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_ops + 1))
    storages = [Storage("x", int(rng.integers(0, 20)), "input"), Storage("w", 7, "parameter")]
    alive, ops, released = ["x", "w"], [], set()
    for number in range(count):
        # Recent storages are likelier inputs, as in a network; old ones make the holes.
        weights = np.linspace(1, 3, len(alive))
        size = min(len(alive), int(rng.integers(0, 4)))
        inputs = [
            str(it) for it in rng.choice(alive, size, replace=False, p=weights / weights.sum())
        ]
        outputs, writes, releases, flags, spaces = [], [], [], {}, ()
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
            if rng.random() < 0.05 and inputs:
                released_now = inputs[0]
                record = next(it for it in storages if it.name == released_now)
                if not record.resident and not record.keep:
                    releases = [released_now]
                    alive.remove(released_now)
                    released.add(released_now)
            for flag in ("random", "replayable", "effect", "collective", "once", "fixed"):
                if rng.random() < 0.06:
                    flags[flag] = True
            if rng.random() < 0.2:
                spaces = (
                    Workspace(int(rng.integers(0, 30)), float(rng.integers(1, 5))),
                    Workspace(0, float(rng.integers(5, 9))),
                )
        alive += outputs
        ops.append(
            Op(
                f"op{number}",
                tuple(inputs),
                tuple(outputs),
                tuple(writes),
                tuple(releases),
                seconds=None if spaces else float(rng.integers(1, 10)),
                workspaces=spaces,
                **flags,
            )
        )
    return Graph(storages, ops, name=f"random {seed}", device=DEVICE)


def brute_force_live(graph: Graph) -> list[int]:
    """Live bytes per op, by asking of every storage at every op whether it is needed later."""
    last = len(graph.ops) - 1
    curve = []
    for at, op in enumerate(graph.ops):
        total = op.workspaces[0].bytes if op.workspaces else 0
        for storage in graph.storages:
            uses = [
                number
                for number, other in enumerate(graph.ops)
                if storage.name in (*other.inputs, *other.outputs, *other.writes, *other.releases)
            ]
            if storage.resident or uses[0] <= at <= (last if storage.keep else uses[-1]):
                total += storage.bytes
        curve.append(total)
    return curve


def training_chain(layers: int, *, seed: int = 0, act: int = 100, skip: bool = False) -> Graph:
    """Layers of an expensive and a cheap op, loss, and their backward ops in reverse."""
    rng = np.random.default_rng(seed)
    storages = [Storage("x", 10, "input"), Storage("w", 40, "parameter")]
    forward, backward = [], []
    before = "x"
    gradient = {}
    for layer in range(layers):
        size = int(act * rng.uniform(0.5, 1.5))
        storages += [Storage(f"c{layer}", size), Storage(f"a{layer}", size)]
        storages += [
            Storage(f"dc{layer}", size, "gradient"),
            Storage(f"da{layer}", size, "gradient"),
        ]
        forward.append(Op(f"conv{layer}", (before, "w"), (f"c{layer}",), kind="conv", seconds=10.0))
        forward.append(Op(f"act{layer}", (f"c{layer}",), (f"a{layer}",), kind="act", seconds=1.0))
        gradient[layer] = before
        before = f"a{layer}"
    storages += [Storage("loss", 1, keep=True), Storage("dx", 10, "gradient", keep=True)]
    forward.append(Op("loss", (before,), ("loss",), seconds=1.0))
    backward.append(Op("dloss", (before,), (f"da{layers - 1}",), phase="backward", seconds=1.0))
    for layer in reversed(range(layers)):
        backward.append(
            Op(
                f"dact{layer}",
                (f"c{layer}", f"da{layer}"),
                (f"dc{layer}",),
                phase="backward",
                seconds=1.0,
            )
        )
        below = f"da{layer - 1}" if layer else "dx"
        backward.append(
            Op(
                f"dconv{layer}",
                (gradient[layer], f"dc{layer}", "w"),
                (below,),
                phase="backward",
                seconds=20.0,
            )
        )
    return Graph(storages, [*forward, *backward], name=f"chain {layers}")
