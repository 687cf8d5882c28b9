r"""A picture of one measured step: computing, codec and exchange, tensor by tensor.

python -m benchmarks training --stamps stamps.json ...
python benchmarks/timeline.py stamps.json picture.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LANES = ("compute", "codec", "link")
NAMES = {"compute": "computing", "codec": "codec", "link": "exchange"}
COLOURS = {"compute": "#5f6368", "codec": "#d55e00", "link": "#0072b2"}
_WORTH_A_NAME = 0.06  # of the step, below which a bar is too short for its tensor's name


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """One panel for each method, on the same scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(11, 1.9 * len(runs) + 0.5), sharex=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    longest = max(end for run in runs for *_, end in run["stamps"])
    for run, axes in zip(runs, panels[:, 0], strict=True):
        for what, name, start, end in run["stamps"]:
            lane = LANES.index(what)
            # Several tensors are under way at once: what is sent is drawn see-through.
            axes.barh(
                lane, end - start, left=start, height=0.7, color=COLOURS[what],
                alpha=0.35 if what == "link" else 0.85, edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if what == "compute" and end - start > _WORTH_A_NAME * longest:
                axes.text((start + end) / 2, lane, name, ha="center", va="center", color="white")
        step = max(end for *_, end in run["stamps"])
        axes.axvline(step, color="#009e73", linewidth=1.5)
        axes.set_yticks(range(len(LANES)), [NAMES[lane] for lane in LANES])
        axes.set_ylim(len(LANES) - 0.5, -0.5)
        axes.set_title(
            f"{run['method']}: {step:.{1 if step > 5 else 2}f} s   ({run['model']}, {run['ranks']} "
            f"ranks, {link_of(run)}{'beside' if run['overlap'] else 'after'} the backward pass)",
            loc="left",
        )
    panels[-1, 0].set(xlabel="seconds", xlim=(0, 1.02 * longest))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def link_of(run: dict[str, Any]) -> str:
    """The rate of a shaped link; nothing for ranks that are not behind one."""
    return f"replayed, {run['gbit']:g} Gbit/s, " if run["gbit"] else ""


def main() -> None:
    """Draw what the file holds of the methods asked for."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("stamps", type=Path)
    flags.add_argument("picture", type=Path)
    flags.add_argument("--methods", nargs="+", default=["plain", "shared"])
    args = flags.parse_args()
    runs = json.loads(args.stamps.read_text())
    chosen = [run for name in args.methods for run in runs if run["method"] == name]
    if not chosen:
        raise SystemExit(f"{args.stamps} has none of {', '.join(args.methods)}")
    draw(chosen, args.picture)


if __name__ == "__main__":
    main()
