"""Seconds per step and time to accuracy of every method, on real ranks over shaped links.

    python -m benchmarks training --json FILE       as root; needs iproute2
    python -m benchmarks training --quick           4 ranks, small: does it all run? 2 minutes
    python -m benchmarks training --clean           removes what a killed run has left

Every rank is a process in a network namespace, with real Horovod over Gloo between them. Small
nets are trained for real. For large ones a step is replayed: a rank sleeps instead of computing on
a GPU, and for the codec it sleeps the CPU seconds measured on a single rank (`travel.py`); the
collectives and their bytes are real. docs/network.md says how and why.

A row is written to FILE when its run ends. Started again with the same flags, the benchmark
resumes after the last row; `--recorded FOLDER` also keeps the recordings.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy: a rank has one core

from published import GPUS, WIRES
from rows_file import flags, load, save
from shaped_links import NoLinksError, ShapedLinks, clean, leftovers
from training_rows import key_of, row_of, table
from training_runs import REPLAYED, TRAINED, estimate_s, replay_runs, say, train_runs
from wire_methods import METHODS


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with what --quick makes of them."""
    parser = flags(__doc__)
    parser.add_argument(
        "--estimate", action="store_true", help="only record and print the time needed"
    )
    parser.add_argument("--quick", action="store_true", help="4 ranks and few steps, 2 minutes")
    parser.add_argument("--clean", action="store_true", help="clean up after a killed run")
    parser.add_argument("--models", nargs="+", choices=REPLAYED + TRAINED, default=list(REPLAYED))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1])
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a replayed run")
    parser.add_argument("--train-steps", type=int, default=400)
    parser.add_argument("--looks", type=int, default=20, help="number of accuracy tests")
    parser.add_argument("--batch", type=int, default=16, help="images per rank in training")
    parser.add_argument("--target", type=float, help="target accuracy, per cent")
    parser.add_argument("--ratio", type=float, default=100.0, help="ratio of the shared exchange")
    parser.add_argument("--warmup", type=int, default=10, help="its dense steps in training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of training")
    parser.add_argument(
        "--gpu", choices=GPUS, default="p100", help="GPU whose published times are used"
    )
    parser.add_argument(
        "--link",
        choices=WIRES,
        default="10gbe",
        help="link of the modelled cluster: --gbit replays it in slow motion, all seconds scaled",
    )
    parser.add_argument(
        "--overlap",
        nargs="+",
        type=int,
        choices=[0, 1],
        default=[0],
        help="1: overlap the exchange with the backward pass",
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        choices=["core", "free"],
        default=["free"],
        help="replayed runs: a codec as fast as one core of this machine, or free",
    )
    parser.add_argument("--recorded", type=Path, help="folder to keep recordings in")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds per link rate")
    args = parser.parse_args(argv)
    args.overlap = [bool(value) for value in args.overlap]
    if args.quick:
        args.models, args.ranks, args.gbit = ["resnet50", "cnn"], 4, [1.0]
        args.methods = ["plain", "fp16", "qsgd", "powersgd", "gather", "shared"]
        args.steps, args.train_steps, args.looks, args.timeout = 1, 20, 1, 110
    return args


def do_runs(
    args: argparse.Namespace,
    gbit: float,
    runs: list[dict[str, Any]],
    rows: list[dict[str, Any]],
) -> None:
    """Do the runs at a rate, and add their rows."""
    from rank_jobs import run_ranks

    def done(number: int, results: list[dict[str, Any]]) -> None:
        run, row = runs[number], row_of(runs[number], results)
        words = " ".join(str(run[k]) for k in ("model", "method", "codec"))
        say(f"{number + 1}/{len(runs)} {words}: {row['step_s']:.3f} s a step")
        rows.append(row)
        save(args.json, rows)

    try:
        with ShapedLinks(args.ranks, gbit) as links:
            run_ranks(runs, links, timeout_s=args.timeout, done=done)
    except NoLinksError as why:
        raise SystemExit(str(why)) from None


def main(argv: list[str] | None = None) -> None:
    """Do what the flags say."""
    args = parse(argv)
    if args.clean:
        left = leftovers()
        clean(left)
        print(f"removed {', '.join(left)}" if left else "nothing is left of earlier runs")
        return
    rows = load(args.json)
    done = {key_of(row) for row in rows}
    with tempfile.TemporaryDirectory() as own:
        folder = args.recorded or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        for gbit in args.gbit:
            wanted = replay_runs(args, gbit, folder) + train_runs(args, gbit)
            runs = [run for run in wanted if key_of(run) not in done]
            minutes = sum(estimate_s(run) for run in runs if run["replayed"]) / 60
            say(
                f"{gbit:g} Gbit/s: {len(runs)} runs to do, {len(wanted) - len(runs)} done before; "
                f"replayed ones should take {minutes:.0f} minutes"
            )
            if runs and not args.estimate:
                do_runs(args, gbit, runs, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
