"""What does gossip cost in accuracy, in Keras on real ranks? The settings of benchmarks/gossip.py.

    python -m benchmarks gossip_tensorflow            the missing runs of the whole study
    python -m benchmarks gossip_tensorflow --quick    20 steps on 2 ranks: does it all run?

horovodrun starts 4, then 8 processes of benchmarks/gossip_tensorflow_rank.py on this machine; every
message is Horovod's over Gloo. All-reduce is sn_compress.tensorflow.keras.DistributedOptimizer, as
Horovod's own does not average under Keras 3. Finished runs are saved at once and not repeated.
The whole study also writes its table into docs/gossip.md and draws docs/gossip_tensorflow.png.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import gossip_report as report
import nets
import numpy as np
from gossip import BATCH, LOOKS, RATE, STEPS, Run, plan
from machine import origin
from rows_file import flags, interruptible, load, missing, path_of, save
from study import learning_rate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/gossip_tensorflow.json"
RANK = Path(__file__).with_name("gossip_tensorflow_rank.py")
METHODS = ("all-reduce", "weights", "weights, not overlapped")


def start(runs: Sequence[Run], path: Path) -> None:
    """Do runs of equally many ranks, which share the seconds that TensorFlow takes to load."""
    ranks, steps = runs[0].ranks, runs[0].steps
    if (data := nets.fetch_fashion_mnist.find()) is None:
        raise SystemExit("Fashion-MNIST is missing; run: python scripts/fetch_fashion_mnist.py")
    job = {
        "runs": [asdict(run) for run in runs],
        "batch": BATCH,
        "rates": [RATE * learning_rate(step, steps) for step in range(steps)],
        "looks": np.linspace(1, steps, min(LOOKS, steps)).astype(int).tolist(),
        "data": str(data),
        "rows": str(path),
        "about": origin(),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(job))
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONUNBUFFERED": "1",
            # Ranks that share a few cores start far apart.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
        }
        horovodrun = ["-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
        subprocess.run(
            [sys.executable, *horovodrun, sys.executable, str(RANK), str(file)],
            env=os.environ | env, stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip


def main() -> None:
    """Do the runs that are missing, then write what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, 2 ranks, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["all-reduce", "weights"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--png", type=Path, help="plot all rows")
    args = parser.parse_args()
    path = path_of(args, RESULTS)
    runs = plan(args.methods, args.seeds, args.ranks, args.steps)
    if args.quick:
        path.unlink(missing_ok=True)
        runs = plan(METHODS, [0], [2], 20)
    todo = missing(runs, load(path))
    for ranks in args.ranks if not args.quick else [2]:
        if alike := [run for run in todo if run.ranks == ranks]:
            start(alike, path)
    rows = load(path)
    save(path, rows)
    report.publish(rows, path, RESULTS, args.png)


if __name__ == "__main__":
    interruptible(main)
