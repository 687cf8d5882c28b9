"""Seconds per step and time to accuracy of every method, on real ranks behind shaped links.

    python benchmarks/training.py --json FILE       as root; needs iproute2
    python benchmarks/training.py --quick           4 ranks, small: does it all run? 2 minutes
    python benchmarks/training.py --clean           removes what a killed run has left

Every rank is a process in a network namespace, real Horovod over Gloo between them. Small nets are
trained for real. Of large ones a step is replayed: where a GPU would compute, a rank sleeps, and
where the codec would, it sleeps the CPU seconds that one rank alone was measured to need
(`travel.py`); the collectives and their bytes are real. docs/network.md says how and why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy: a rank has one core

import numpy as np
from machine import commit, machine
from shaped_links import NoLinksError, ShapedLinks, clean, leftovers
from travel import Script, record
from wire_methods import METHODS, OURS, method

from sn_compress.cost import wire_bytes
from sn_compress.layers import Layer, layers

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
_KEYS = ("model", "method", "ranks", "gbit", "replayed", "codec", "overlap")


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
                _say(f"recording {way} on the tensors of {name}")
                found = scripts_of(model, way, args.ranks, args.ratio)
                path.write_text(json.dumps([vars(script) for script in found]))
            # A rival's codec here is plain NumPy: that it takes no time is the most it can claim.
            codecs = ("alone",) if way in _WHOLE else args.rivals
            runs += [
                {
                    "model": name, "method": way, "ranks": args.ranks, "gbit": gbit,
                    "replayed": True, "codec": codec, "free": codec == "free", "overlap": overlap,
                    "compute_s": compute_s, "steps": args.steps, "scripts": str(path),
                    "ratio": args.ratio,
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
            "target": args.target or TARGETS[name], "ratio": args.ratio,
        }
        for name in args.models if name in TRAINED
        for way in args.methods
    ]  # fmt: skip


def row_of(run: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A flat row from what all ranks of a run found."""
    if run["replayed"]:
        elements = sum(layer.elements for layer in layers(run["model"]))
    else:
        from nets import NETS

        elements = sum(p.numel() for p in NETS[run["model"]]().parameters())
    first = results[0]
    idle = [r["idle_bytes_per_s"] for r in results if "idle_bytes_per_s" in r]
    reported = [r["reported_bytes_per_step"] for r in results if "reported_bytes_per_step" in r]
    return {
        **{key: run[key] for key in _KEYS},
        "compute_s": run.get("compute_s"),
        "ratio": 4 * elements / first["sent_bytes"],
        "sent_bytes": round(first["sent_bytes"]),
        "bytes_per_step": round(statistics.fmean(r["bytes_per_step"] for r in results)),
        "reported_bytes_per_step": round(statistics.fmean(reported)) if reported else None,
        "idle_bytes_per_s": None if not idle else round(statistics.fmean(idle)),
        "step_s": max(r["step_s"] for r in results),
        "accuracy": first.get("accuracy"),
        "target": run.get("target"),
        "seconds_to_target": first.get("seconds_to_target"),
        "steps": run["steps"],
        "load": os.getloadavg()[0],
        "commit": commit(),
        "machine": machine(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them, with what each is to plain."""
    lines = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("model", "ranks", "gbit", "overlap")), []).append(
            row
        )
    for (model, ranks, gbit, overlap), group in groups.items():
        kind = "replayed" if group[0]["replayed"] else "trained"
        lines += [
            f"\n{model}, {ranks} ranks, {gbit:g} Gbit/s, {kind}"
            f"{', exchange beside the backward pass' if overlap else ''}",
            f"{'method':10} {'codec':6} {'s/step':>8} {'x plain':>8} {'ratio':>7} {'MB/step':>9} "
            f"{'reported':>9} {'accuracy':>9} {'s to target':>12}",
        ]
        plain = [row["step_s"] for row in rows if row["method"] == "plain" and _same(row, group[0])]
        for row in group:
            faster = f"{plain[0] / row['step_s']:8.2f}" if plain else " " * 8
            told = row["reported_bytes_per_step"]
            lines.append(
                f"{row['method']:10} {row['codec']:6} {row['step_s']:8.3f} {faster} "
                f"{row['ratio']:7.1f} {row['bytes_per_step'] / 1e6:9.2f} "
                f"{_text(told and told / 1e6, 2):>9} {_text(row['accuracy'], 1):>9} "
                f"{_text(row['seconds_to_target'], 1):>12}"
            )
    return "\n".join(lines)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = ["model", "ranks", "gbit", "replayed"]
    keys += ["overlap"] if row["replayed"] else []
    return all(row[key] == other[key] for key in keys)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with what --quick makes of them."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--json", type=Path, help="rows go there")
    flags.add_argument("--stamps", type=Path, help="time stamps of a step of each replayed run")
    flags.add_argument("--quick", action="store_true", help="4 ranks and few steps, 2 minutes")
    flags.add_argument("--clean", action="store_true", help="remove what a killed run has left")
    flags.add_argument("--models", nargs="+", choices=REPLAYED + TRAINED, default=list(REPLAYED))
    flags.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    flags.add_argument("--ranks", type=int, default=8)
    flags.add_argument("--gbit", type=float, nargs="+", default=[0.1])
    flags.add_argument("--steps", type=int, default=3, help="timed ones of a replayed run")
    flags.add_argument("--train-steps", type=int, default=400)
    flags.add_argument("--looks", type=int, default=20, help="times accuracy is taken in training")
    flags.add_argument("--batch", type=int, default=16, help="images per rank in training")
    flags.add_argument("--target", type=float, help="per cent right that the clock is read at")
    flags.add_argument("--ratio", type=float, default=100.0, help="of the shared exchange")
    flags.add_argument(
        "--compute",
        choices=["rho", "gpu"],
        default="rho",
        help="seconds of computing: plain exchange over --rho, or of a GPU as published",
    )
    flags.add_argument("--rho", type=float, default=PAPER_RHO)
    flags.add_argument(
        "--overlap", nargs="+", type=int, choices=[0, 1], default=[0], help="exchange beside it"
    )
    flags.add_argument(
        "--rivals",
        nargs="+",
        choices=["alone", "free"],
        default=["alone", "free"],
        help="codec of rivals in replayed runs: as measured, or taking no time",
    )
    flags.add_argument("--recorded", type=Path, help="folder in which recordings are kept")
    flags.add_argument("--timeout", type=float, default=3600, help="seconds for a rate")
    args = flags.parse_args(argv)
    args.overlap = [bool(value) for value in args.overlap]
    if args.quick:
        args.models, args.ranks, args.gbit = ["resnet50", "cnn"], 4, [1.0]
        args.methods = ["plain", "fp16", "qsgd", "powersgd", "gather", "shared"]
        args.steps, args.train_steps, args.looks, args.timeout = 1, 20, 1, 110
    return args


def main(argv: list[str] | None = None) -> None:
    """Do what the flags say."""
    args = parse(argv)
    if args.clean:
        left = leftovers()
        clean(left)
        print(f"removed {', '.join(left)}" if left else "nothing is left of earlier runs")
        return
    rows: list[dict[str, Any]] = []
    stamps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as own:
        folder = args.recorded or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        for gbit in args.gbit:
            runs = replay_runs(args, gbit, folder) + train_runs(args, gbit)
            try:
                from rank_jobs import run_ranks

                with ShapedLinks(args.ranks, gbit) as links:

                    def done(number: int, step_s: float, runs: Any = runs) -> None:
                        words = [str(runs[number][k]) for k in ("model", "method", "codec")]
                        _say(f"{number + 1}/{len(runs)} {' '.join(words)}: {step_s:.3f} s a step")

                    found = run_ranks(runs, links, timeout_s=args.timeout, done=done)
            except NoLinksError as why:
                raise SystemExit(str(why)) from None
            rows += [row_of(run, results) for run, results in zip(runs, found, strict=True)]
            for run, results in zip(runs, found, strict=True):
                if run["replayed"]:
                    key = {key: run[key] for key in _KEYS}
                    stamps.append(key | {"stamps": results[0]["stamps"]})
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(table(rows))
    if args.stamps:
        args.stamps.write_text(json.dumps(stamps))


if __name__ == "__main__":
    main()
