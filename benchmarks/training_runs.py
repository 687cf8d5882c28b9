"""What benchmarks/training.py runs: recordings to replay, and trainings."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from published import WIRES, step_on
from travel import Script, record
from wire_methods import OURS, method

from sn_compress.prediction.cost import Layer, Method, Route, layers, wire_bytes

REPLAYED = ("alexnet", "resnet50")
TRAINED = ("cnn", "transformer")
TARGETS = {"cnn": 84.0, "transformer": 82.0}  # per cent of 2,000 test images
_CAP = 2**22  # elements of a tensor that rivals are timed on; their seconds grow with it
_WHOLE = (*OURS, "plain", "fp16", "powersgd")


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


def gradient(layer: Layer, seed: int, most: int | None = None) -> np.ndarray:
    """A synthetic gradient in a layer's shape: nearly of low rank, with heavy tails.

    Only what is selected and which ranks are chosen depends on it, not bytes or time.
    """
    rng = np.random.default_rng(seed)
    rows, columns = layer.shape[0], math.prod(layer.shape[1:])
    if most and rows * columns > most:
        rows = max(64 * (most // columns // 64), 1)
    if len(layer.shape) == 1:
        return rng.standard_normal(rows, dtype=np.float32)
    noise = rng.standard_normal((rows, columns), dtype=np.float32)
    noise *= np.abs(noise)
    strengths = np.float32(4) * np.arange(1, 9, dtype=np.float32) ** -1
    left = rng.standard_normal((rows, 8), dtype=np.float32) * strengths
    noise += left @ rng.standard_normal((8, columns), dtype=np.float32)
    complete = rows * columns == layer.elements
    return noise.reshape(layer.shape if complete else (rows, *layer.shape[1:]))


def scripts_of(model: list[Layer], name: str, ranks: int, ratio: float) -> list[Script]:
    """Recorded exchanges of a model, in the order of its layers."""
    most = None if name in _WHOLE else _CAP
    gradients = {t.name: gradient(t, seed, most) for seed, t in enumerate(model)}
    # The shared exchange has a dense step and one on which it chooses ranks.
    way = method(name, ranks=ranks, ratio=ratio)
    scripts = record(way, gradients, ranks, warm=2 if name == "shared" else 0)
    for script, layer in zip(scripts, model, strict=True):
        share = layer.elements / gradients[layer.name].size
        script.codec_s = [share * seconds for seconds in script.codec_s]
        script.rounds = [(kind, round(share * n), dtype) for kind, n, dtype in script.rounds]
        if name == "plain":
            script.codec_s = [0.0, 0.0]  # Horovod scales while it sums
    return scripts


def plain_s(model: list[Layer], ranks: int, gbit: float) -> float:
    """Seconds in which the bytes of a plain exchange cross a link."""
    size = 4 * sum(layer.elements for layer in model)
    return wire_bytes("allreduce", size, ranks) / (gbit * 1e9 / 8)


def recorded(folder: Path, model: str, way: str, ranks: int, ratio: float) -> list[Script]:
    """The scripts of a method on a model, from the folder or made and kept there."""
    path = folder / f"{model}-{way}-{ranks}-{ratio:g}.json"
    if not path.exists():
        say(f"recording {way} on the tensors of {model}")
        scripts = scripts_of(layers(model), way, ranks, ratio)
        path.write_text(json.dumps([vars(script) for script in scripts]))
    return [Script(**entry) for entry in json.loads(path.read_text())]


def routes_of(scripts: list[Script], *, free: bool) -> list[Route]:
    """Scripts as the model of costs has them; with `free` the codec takes no time."""
    routes = []
    for script in scripts:
        codec_s = tuple(0.0 if free else seconds for seconds in script.codec_s)
        # What is fused with what is told by the method; which one it is does not matter here.
        fused: Method = "shared" if script.rounds[0][0] == "allreduce" else "gather"
        routes.append(Route(fused, tuple(script.sent), codec_s))  # type: ignore[arg-type]
    return routes


def replay_runs(args: argparse.Namespace, gbit: float, folder: Path) -> list[dict[str, Any]]:
    """What to replay at a rate."""
    wire = WIRES[args.link]
    slow = wire.gbit / gbit
    runs = []
    for name in (model for model in args.models if model in REPLAYED):
        step = step_on(args.gpu, name)
        if step is None:
            raise SystemExit(f"no published step of {name} on {args.gpu}; benchmarks/published.py")
        for way in args.methods:
            # Plain has no codec.
            for codec in ("free",) if way == "plain" else args.codec:
                for overlap in args.overlap:
                    scripts = recorded(folder, name, way, args.ranks, args.ratio)
                    path = folder / f"{name}-{way}-{args.ranks}-{args.ratio:g}.slow{slow:g}"
                    slowed = [
                        Script(s.name, s.rounds, [slow * seconds for seconds in s.codec_s])
                        for s in scripts
                    ]
                    path.write_text(json.dumps([vars(script) for script in slowed]))
                    free = codec == "free"
                    runs.append(
                        {
                            "model": name, "method": way, "ranks": args.ranks, "gbit": gbit,
                            "replayed": True, "codec": codec, "free": free, "overlap": overlap,
                            "gpu": args.gpu, "link": args.link, "slow": slow,
                            "compute_s": slow * step.seconds, "steps": args.steps,
                            "codec_s": 0.0 if free else sum(sum(s.codec_s) for s in slowed),
                            "scripts": str(path), "ratio_asked": args.ratio,
                        }
                    )  # fmt: skip
    return runs


def train_runs(args: argparse.Namespace, gbit: float) -> list[dict[str, Any]]:
    """What to train at a rate."""
    return [
        {
            "model": name, "method": way, "ranks": args.ranks, "gbit": gbit, "replayed": False,
            "codec": "run", "overlap": way in ("plain", "fp16", *OURS), "batch": args.batch,
            "steps": args.train_steps,
            "every": max(args.train_steps // args.looks, 1),
            "target": args.target or TARGETS[name], "ratio_asked": args.ratio,
            "warmup": args.warmup, "seed": seed,
        }
        for seed in args.seeds
        for name in args.models if name in TRAINED
        for way in args.methods
    ]  # fmt: skip


def estimate_s(run: dict[str, Any]) -> float:
    """Seconds that a replayed run should take, warming up included."""
    scripts = [Script(**entry) for entry in json.loads(Path(run["scripts"]).read_text())]
    codec_s = 0.0 if run["free"] else sum(sum(script.codec_s) for script in scripts)
    sent = [wire_bytes(kind, size, run["ranks"]) for s in scripts for kind, size in s.sent]  # type: ignore[arg-type]
    link_s = sum(sent) / (run["gbit"] * 1e9 / 8)
    overlapped_s = max(run["compute_s"], codec_s, link_s)
    step_s = overlapped_s if run["overlap"] else run["compute_s"] + codec_s + link_s
    return float(link_s + run["steps"] * step_s)
