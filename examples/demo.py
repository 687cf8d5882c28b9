"""Fashion-MNIST on two ranks, plain and with LowRankCompression: a table and a picture.

    python examples/demo.py

Both runs are examples/torch_fashion_mnist.py under horovodrun; only `--compression` differs. A
third begins as the second, within a budget of memory, and ends after one epoch.
"""

import argparse
from pathlib import Path

import _launch
import _plots

from sn_memory.base.sizes import show_bytes

ROOT = Path(__file__).resolve().parent.parent
NOTE = """\
Seconds are those of two ranks on one machine, with no network between them: they show what the
codec costs, not what fewer bytes gain. Relative error is the part of gradient and memory that one
step leaves out, on average; error feedback sends it in later steps. The first ten steps are dense,
and counted: the longer the training, the nearer the ratio comes to the one asked for."""


def table(runs):
    """Return [(name, history)] as lines of text."""
    rows = [("method", "test accuracy", "seconds", "bytes/rank/step", "ratio", "relative error")]
    for name, run in runs:
        accuracy, ratio = run["accuracy"][-1], run["dense_bytes"] / run["payload_bytes"]
        row = f"{accuracy:.2f} %|{run['seconds']:.1f}|{run['payload_bytes']:,.0f}|{ratio:.1f}"
        rows.append((name, *row.split("|"), f"{run.get('relative_error', 0):.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    formats = ["<", *">" * (len(widths) - 1)]
    return "\n".join(
        "  ".join(f"{cell:{f}{w}}" for cell, f, w in zip(row, formats, widths, strict=True))
        for row in rows
    )


def picture(runs, path):
    """Draw loss over steps, and bytes per step, of [(name, history)] into a PNG file."""
    figure, (losses, sizes) = _plots.new_figure()
    ends, bars = [], []
    for (name, run), colour in zip(runs, _plots.COLOURS, strict=False):
        steps = range(1, len(run["loss"]) + 1)
        mean = _plots.running_mean(run["loss"], width=max(1, len(steps) // 40))
        losses.plot(steps, run["loss"], color=colour, alpha=0.2, linewidth=0.5)
        losses.plot(steps, mean, color=colour, linewidth=2)
        ends.append((steps[-1], mean[-1], name, colour))
        bars.append((name, run["payload_bytes"], colour))
    losses.set(xlabel="step", xlim=(0, len(steps)), ylim=(0, 2.4 if len(steps) < 500 else 1.2))
    losses.set_title("training loss: each step (faint) and running mean", loc="left")
    _plots.bars_of_bytes(sizes, bars)
    _plots.label_ends(losses, ends)
    figure.savefig(path, dpi=110)


def memory(planned, unplanned):
    """Say what a plan saved, and whether it trained as the run without did."""
    losses = planned["loss"]
    same = losses == unplanned["loss"][: len(losses)]
    peaks = [show_bytes(planned[key]) for key in ("unplanned_bytes", "peak_bytes")]
    alike = "the same to the bit" if same else "not those"
    return (
        f"LowRankCompression and a memory plan: a step holds {peaks[1]} instead of {peaks[0]}; its "
        f"{len(losses)} losses are {alike} without the plan."
    )


def main():
    """Train, then print the table and draw the picture."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--epochs", type=int, default=4)
    flags.add_argument("--ratio", type=float, default=100, help="how many times fewer bytes")
    flags.add_argument("--budget", default="93%", help="most memory of a step in the last run")
    flags.add_argument("--data", help="folder of Fashion-MNIST's four .gz files")
    flags.add_argument(
        "--out", type=Path, default=ROOT / "demo-results", help="where demo.png goes"
    )
    flags.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    args = flags.parse_args()
    common = ["--epochs", 1 if args.quick else args.epochs]
    common += ["--limit", 2560] if args.quick else []
    common += ["--data", args.data] if args.data else []
    methods = {
        "plain Horovod": ["--compression", "none"],
        "LowRankCompression": ["--compression", "lowrank", "--ratio", args.ratio],
    }
    runs = []
    for number, (name, its_flags) in enumerate(methods.items(), start=1):
        print(f"{number}/{len(methods) + 1} {name}: 2 ranks of one thread each", flush=True)
        runs.append((name, _launch.train(*common, *its_flags, title="    ")))
    print("3/3 LowRankCompression and a memory plan: one epoch", flush=True)
    both = [*common, *its_flags, "--budget", args.budget, "--stop", 1]
    saved = memory(_launch.train(*both, title="    "), runs[-1][1])
    args.out.mkdir(parents=True, exist_ok=True)
    picture(runs, args.out / "demo.png")
    print(f"\n{table(runs)}\n\n{NOTE}\n\n{saved}\n\nLoss curves and bytes: {args.out / 'demo.png'}")


if __name__ == "__main__":
    main()
