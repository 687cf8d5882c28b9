"""Does compressed training reach the accuracy of plain training? Each method, several seeds.

    python -m benchmarks accuracy            the whole study, about an hour on two cores
    python -m benchmarks accuracy --quick    one epoch on few images: does it all run?

Trains examples/torch_fashion_mnist.py on two ranks of one thread. A finished run is saved at once
and not done again, so the study may be stopped and started at will. The whole study also writes
its table into docs/accuracy.md, and its picture to docs/accuracy.png.
"""

import statistics
import sys
import time
from pathlib import Path

import _accuracy_report as report
from machine import origin
from rows_file import flags, interruptible, load, path_of, save
from tables import put_into

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import _launch  # noqa: E402  (examples/ is no package)

RESULTS = ROOT / "benchmarks/results/accuracy.json"


def train_once(method, theta, block, seed, epochs, images, data):
    """Train; return the run as one flat row, and a flat row per epoch."""
    flags = ["--compression", method, "--seed", seed, "--epochs", epochs, "--limit", images]
    flags += ["--theta", theta, "--block", block] if method == "fft" else []
    flags += ["--data", data] if data else []
    start = time.monotonic()
    seen = _launch.train(*flags, title="    ")
    steps = len(seen["loss"]) // epochs
    losses = [statistics.fmean(seen["loss"][e * steps : (e + 1) * steps]) for e in range(epochs)]
    key = {"method": method, "theta": theta, "block": block, "seed": seed}
    row = key | {
        "epochs": epochs,
        "images": images,
        "ranks": seen["ranks"],
        "accuracy": round(seen["accuracy"][-1], 2),
        "final_loss": round(losses[-1], 4),  # mean over the last epoch
        "seconds": round(seen["seconds"], 1),
        "wall_s": round(time.monotonic() - start, 1),
        "ratio": round(seen["dense_bytes"] / seen["payload_bytes"], 2),
        "payload_bytes": seen["payload_bytes"],
        "relative_error": round(seen.get("relative_error", 0.0), 4),
        **origin(),
    }
    pairs = enumerate(zip(losses, seen["accuracy"], strict=True), start=1)
    key |= {"epochs": epochs, "images": images}
    return row, [key | {"epoch": e, "loss": round(v, 4), "accuracy": a} for e, (v, a) in pairs]


def main():
    """Do the runs that are missing, then write what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and epoch, few images")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=60000, help="training images; all: 60000")
    parser.add_argument("--data", help="folder of Fashion-MNIST's four .gz files")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.seeds, args.images = 1, [0], 6400
    path = path_of(args, RESULTS)
    curve_path = path.with_suffix(".curves.json")

    # Quick runs are about the code of today; the long study is worth continuing.
    rows, curves = ([], []) if args.quick else (load(path), load(curve_path))
    size = (args.epochs, args.images)
    done = {(*report.key(row), row["seed"], row["epochs"], row["images"]) for row in rows}
    # Seed by seed, so that a study stopped early has compared all methods.
    runs = [(name, *key, seed) for seed in args.seeds for name, key in report.METHODS.items()]
    runs = [run for run in runs if (*run[1:], *size) not in done]
    for number, (name, *setting) in enumerate(runs):
        walls = [row["wall_s"] for row in rows if (row["epochs"], row["images"]) == size]
        left = statistics.fmean(walls) * (len(runs) - number) / 60 if walls else None
        eta = f", about {left:.0f} min left" if walls else ""
        print(f"{number + 1}/{len(runs)} {name}, seed {setting[-1]}{eta}", flush=True)
        row, curve = train_once(*setting, *size, args.data)
        rows, curves = [*rows, row], [*curves, *curve]
        save(curve_path, curves)
        save(path, rows)

    rows, curves = (
        [row for row in some if (row["epochs"], row["images"]) == size] for some in (rows, curves)
    )
    text = f"{report.table(rows)}\n\n{report.source(rows)}"
    print(f"\n{text}\n\nrows: {path}")
    if path == RESULTS:
        report.picture(rows, curves, ROOT / "docs/accuracy.png")
        text = f"![{report.CAPTION}](accuracy.png)\n\n{text}"
        put_into(ROOT / "docs/accuracy.md", "accuracy", text)


if __name__ == "__main__":
    interruptible(main)
