"""The two pictures of README, from measured results.

    python -m benchmarks first_page            draw both from benchmarks/results
    python -m benchmarks first_page --measure  measure the memory first: a minute, 4 GiB

docs/step.png: seconds of a step behind 1 Gbit/s, of the rows of benchmarks/pays.py. Computing is a
step without DDP; codec and copies into buckets are measured rates times the elements; the rest of
the measured step is exchange. docs/memory.png: bytes of live storages over the CPU seconds of one
training step of ResNet-50, plain and planned, counted by StorageTracker after each call.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import origin
from models import resnet
from pays import predicted_step
from pictures import pyplot
from rows_file import load

ROOT = Path(__file__).resolve().parent.parent
STEPS = ROOT / "benchmarks/results/pays.json"
MEMORY = ROOT / "benchmarks/results/first_page.json"
GREY, ORANGE, BLUE, GREEN = "#5f6368", "#d55e00", "#0072b2", "#009e73"
NAMES = {"plain": "plain DDP", "low rank 100": "LowRankCompression", "gather": "FFTCompression"}
MODELS = {"resnet50": "ResNet-50", "transformer": "Transformer, 7.4 M parameters"}
BATCH, BUDGET = 8, "50%"
POINTS = 600  # of a curve that is kept


def curve_of(model: Any, images: torch.Tensor) -> tuple[list[tuple[float, int]], int]:
    """(CPU seconds, live bytes) after each call of one training step, and the peak."""
    from sn_memory.torch import StorageTracker

    class Timeline(StorageTracker):
        """Keeps what it counts."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            curve.append((time.process_time() - start, self.live_bytes))
            return result

    curve: list[tuple[float, int]] = []
    held = [*model.parameters(), *model.buffers(), images]
    for turn in range(2):  # the first one warms up
        model.zero_grad()
        curve.clear()
        start = time.process_time()
        with Timeline(held) as tracker:
            model(images).sum().backward()
        del turn
    return curve, tracker.peak_bytes


def measure() -> None:
    """One step plain and one planned; the curves, thinned to what a picture shows."""
    import sn_memory.torch

    sn_memory.settings.progress = True
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = torch.randn(BATCH, 3, 224, 224)
    model = resnet(50)
    rows = []
    for way in ("plain", "planned"):
        if way == "planned":
            model = sn_memory.torch.plan(model, images, BUDGET, planner="auto")
        points, peak = curve_of(model, images)
        width = max(1, len(points) // POINTS)
        thin = [
            max(points[i : i + width], key=lambda at: at[1]) for i in range(0, len(points), width)
        ]
        row = {"way": way, "peak_bytes": peak, "seconds": points[-1][0], "calls": len(points)}
        curve = [(round(at, 4), size) for at, size in thin]
        rows.append(row | {"curve": curve, "budget": BUDGET, "batch": BATCH})
        rows[-1] |= origin()
        print(f"{way}: {peak / 2**20:,.0f} MiB, {points[-1][0]:.2f} s")
    MEMORY.write_text(json.dumps(rows) + "\n")


def _axes(width: float, high: float) -> Any:
    plt = pyplot()

    # Large, as a phone shows the picture a third as wide.
    plt.rcParams.update({"font.size": 17, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(figsize=(width, high), layout="constrained")


def draw_step(to: Path) -> None:
    """Bars of a step's parts, plain beside ours."""
    rows = [row for row in load(STEPS) if row["gbit"] == 1 and row["way"] in NAMES]
    figure, axes = _axes(10, 5.4)
    place, ticks = 0.0, []
    for model, title in MODELS.items():
        own = {row["way"]: row for row in rows if row["model"] == model}
        plain = own["plain"]["step_s"]
        axes.text(0, place - 0.75, f"{title}, 2 ranks, 1 Gbit/s", fontweight="bold")
        for way, name in NAMES.items():
            row = own[way]
            computing, codec = row["compute_s"], predicted_step(row).codec_s
            parts = [computing, codec, max(row["step_s"] - computing - codec, 0)]
            left = 0.0
            for seconds, colour in zip(parts, (GREY, ORANGE, BLUE), strict=True):
                axes.barh(place, seconds / plain, left=left / plain, color=colour, height=0.74)
                left += seconds
            faster = f"  {plain / row['step_s']:.1f} times" if way != "plain" else ""
            axes.text(left / plain, place, f" {row['step_s']:.2f} s{faster}", va="center")
            ticks.append((place, name))
            place += 1
        place += 1.1
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set(xlim=(0, 1.2), xticks=[], ylim=(place - 1.2, -1.3))
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for at, (name, colour) in enumerate(
        (("computing", GREY), ("codec, copies", ORANGE), ("exchange", BLUE))
    ):
        axes.text(
            (0, 0.24, 0.52)[at],
            1.02,
            name,
            color=colour,
            fontweight="bold",
            transform=axes.transAxes,
        )
    figure.suptitle("Seconds of a step", x=0.01, ha="left", fontweight="bold")
    figure.savefig(to, dpi=110)


def draw_memory(to: Path) -> None:
    """Memory over a step, plain beside planned."""
    figure, axes = _axes(10, 5.0)
    for row, colour in zip(json.loads(MEMORY.read_text()), (GREY, GREEN), strict=True):
        times, sizes = zip(*row["curve"], strict=True)
        mib = [size / 2**20 for size in sizes]
        axes.plot(times, mib, color=colour, linewidth=2.5)
        axes.fill_between(times, mib, color=colour, alpha=0.15)
        top = max(range(len(mib)), key=mib.__getitem__)
        name = "plain" if row["way"] == "plain" else f"planned for {row['budget'].rstrip('%')} %"
        axes.annotate(
            f"{name}: {row['peak_bytes'] / 2**20:,.0f} MiB", (times[top], mib[top]), xytext=(0, 8),
            textcoords="offset points", ha="center", color=colour, fontweight="bold",
        )  # fmt: skip
    axes.set(xlabel="CPU seconds", xlim=(0, None), ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f} MiB")
    axes.margins(y=0.2)
    figure.suptitle(
        f"Memory over a training step, ResNet-50, {BATCH} images",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    figure.savefig(to, dpi=110)


def main() -> None:
    """Measure, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure a step's memory first")
    args = parser.parse_args()
    if args.measure:
        measure()
    draw_step(ROOT / "docs/step.png")
    draw_memory(ROOT / "docs/memory.png")


if __name__ == "__main__":
    main()
