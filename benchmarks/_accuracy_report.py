"""Report of benchmarks/accuracy.py's rows: a table and a picture, written into the docs."""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import _plots
from tables import markdown

# name -> (method, theta, block); block 0 is one transform over the whole gradient.
METHODS = {
    "plain Horovod": ("none", None, None),
    "theta 0.9": ("fft", 0.9, 4096),
    "theta 0.9, whole tensor": ("fft", 0.9, 0),
    "theta 0.98": ("fft", 0.98, 4096),
}
CAPTION = "Test accuracy over epochs for each method, and bytes sent per step"
COLUMNS = (
    "method",
    "test accuracy, %",
    "against plain, points",
    "last epoch's loss",
    "bytes per rank and step",
    "ratio",
    "relative error",
    "seconds",
    "seeds",
)


def key(row):
    """Return what tells methods apart."""
    return row["method"], row["theta"], row["block"]


def by_method(rows):
    """Return {name: rows of that method}, in the table's order, without empty ones."""
    groups = {name: [r for r in rows if key(r) == value] for name, value in METHODS.items()}
    return {name: group for name, group in groups.items() if group}


def mean(rows, field):
    """Return the mean of a field over rows."""
    return statistics.fmean(row[field] for row in rows)


def with_spread(values, sign=""):
    """Return "mean ± standard deviation"; one value has no spread."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.2f}{spread}" if values else ""


def table(rows):
    """Return the rows as a Markdown table, one line per method."""
    plain = {row["seed"]: row["accuracy"] for row in rows if row["method"] == "none"}
    lines = []
    for name, group in by_method(rows).items():
        # By seed: it fixes weights and order, so a difference has less noise than two means.
        gaps = [row["accuracy"] - plain[row["seed"]] for row in group if row["seed"] in plain]
        lines.append(
            (
                name,
                with_spread([row["accuracy"] for row in group]),
                "" if group[0]["method"] == "none" else with_spread(gaps, "+"),
                f"{mean(group, 'final_loss'):.3f}",
                f"{mean(group, 'payload_bytes'):,.0f}",
                f"{mean(group, 'ratio'):.1f}",
                f"{mean(group, 'relative_error'):.3f}",
                f"{mean(group, 'seconds'):.0f}",
                str(len(group)),
            )
        )
    return markdown(COLUMNS, lines)


def source(rows):
    """Return where the numbers come from, in one paragraph."""
    epochs, ranks, commits, machines = (
        ", ".join(sorted({str(row[field]) for row in rows}))
        for field in ("epochs", "ranks", "commit", "machine")
    )
    return (
        f"From `python -m benchmarks accuracy`: {epochs} epochs on {ranks} ranks of one thread,"
        " mean ± standard deviation over seeds, differences taken seed by seed."
        f" Commit {commits}; {machines}."
    )


def picture(rows, curves, path):
    """Draw test accuracy over epochs, with its range over seeds, and bytes per step."""
    figure, (accuracy, sizes) = _plots.new_figure()
    ends, bars = [], []
    for (name, group), colour in zip(by_method(rows).items(), _plots.COLOURS, strict=False):
        at = {}
        for point in curves:
            if key(point) == METHODS[name]:
                at.setdefault(point["epoch"], []).append(point["accuracy"])
        means = [statistics.fmean(values) for values in at.values()]
        low, high = map(min, at.values()), map(max, at.values())
        accuracy.fill_between(
            list(at), list(low), list(high), color=colour, alpha=0.15, linewidth=0
        )
        accuracy.plot(list(at), means, color=colour, linewidth=2)
        ends.append((max(at), means[-1], name, colour))
        bars.append((name, mean(group, "payload_bytes"), colour))
    accuracy.set_title("test accuracy in %: mean, and range over seeds", loc="left")
    accuracy.set(xlabel="epoch", xlim=(1, max(2, *(point["epoch"] for point in curves))))
    _plots.bars_of_bytes(sizes, bars)
    _plots.label_ends(accuracy, ends)
    figure.savefig(path, dpi=110)
