"""What benchmarks/training.py runs: recordings to replay, and trainings."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from travel import Script, record
from wire_methods import OURS, method

from sn_compress.prediction.cost import wire_bytes
from sn_compress.prediction.layers import Layer, layers

REPLAYED = ("alexnet", "resnet50")
TRAINED = ("cnn", "transformer")
TARGETS = {"cnn": 84.0, "transformer": 82.0}  # per cent of 2,000 test images
# Forward and backward pass of 16 images on a Titan X (Pascal), cuDNN 5.1, as jcjohnson's
# cnn-benchmarks publishes them.
GPU_STEP_S = {"alexnet": 14.56e-3, "resnet50": 103.58e-3}
# Plain exchange over computing. From the paper's 2.26x: with a gather of 8 ranks at its ratio of
# 17.8 (a tenth of the coefficients in 8 bits, and a bitmap), a codec that takes no time and no
# overlap, (1 + rho) / (1 + rho / 4.45) = 2.26 gives 2.56. docs/network.md.
PAPER_RHO = 2.56
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
    whole = rows * columns == layer.elements
    return noise.reshape(layer.shape if whole else (rows, *layer.shape[1:]))


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


def replay_runs(args: argparse.Namespace, gbit: float, folder: Path) -> list[dict[str, Any]]:
    """What to replay at a rate."""
    runs = []
    for name in (model for model in args.models if model in REPLAYED):
        model = layers(name)
        if args.compute == "gpu":
            compute_s = GPU_STEP_S[name]
        else:
            compute_s = plain_s(model, args.ranks, gbit) / args.rho
        for way in args.methods:
            path = folder / f"{name}-{way}-{args.ranks}-{args.ratio:g}.json"
            if not path.exists():
                say(f"recording {way} on the tensors of {name}")
                found = scripts_of(model, way, args.ranks, args.ratio)
                path.write_text(json.dumps([vars(script) for script in found]))
            # A rival's codec here is plain NumPy: that it takes no time is the most it can claim.
            codecs = ("alone",) if way in _WHOLE else args.rivals
            runs += [
                {
                    "model": name, "method": way, "ranks": args.ranks, "gbit": gbit,
                    "replayed": True, "codec": codec, "free": codec == "free", "overlap": overlap,
                    "compute_s": compute_s, "steps": args.steps, "scripts": str(path),
                    "ratio_asked": args.ratio,
                }
                for codec in codecs
                for overlap in args.overlap
            ]  # fmt: skip
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
        }
        for name in args.models if name in TRAINED
        for way in args.methods
    ]  # fmt: skip


def estimate_s(run: dict[str, Any]) -> float:
    """Seconds that a replayed run should take, warming up included."""
    scripts = [Script(**entry) for entry in json.loads(Path(run["scripts"]).read_text())]
    codec_s = 0.0 if run["free"] else sum(sum(script.codec_s) for script in scripts)
    sent = [wire_bytes(kind, size, run["ranks"]) for s in scripts for kind, size in s.sent]  # type: ignore[arg-type]
    link_s = sum(sent) / (run["gbit"] * 1e9 / 8)
    beside = max(run["compute_s"], codec_s, link_s)
    step_s = beside if run["overlap"] else run["compute_s"] + codec_s + link_s
    return float(link_s + run["steps"] * step_s)
