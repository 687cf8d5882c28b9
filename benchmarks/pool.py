"""How tightly and how fast buffers are packed: MiniMalloc's files, random ones, 100,000 at once.

    python -m benchmarks pool [--quick] [--json FILE] [--png FILE]

Each packing is checked by sn_memory/check.py. Seconds are those of the process on one core,
so that neighbours on the machine do not count; `seconds` is the median of the runs. `height` and
`greedy` rows are over the lower bound, the largest sum of live sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, origin
from pictures import pyplot
from rows_file import flags, save

from sn_memory import arrange, check_packing
from sn_memory.pool.pack import RULES, first_fit, order_by
from sn_memory.pool.problem import read_csv, read_problem

FILES = sorted((ROOT / "tests/data/minimalloc").glob("*.csv"))
CAPACITY = 1_048_576


def scattered(count: int, seed: int) -> np.ndarray:
    """Lives anywhere, most of them short."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, count, count)
    span = np.minimum((rng.pareto(1.0, count) * 10 + 1).astype(int), count)
    return np.stack([lower, lower + span, rng.integers(1, 1000, count) * 512], 1)


def nested(count: int, seed: int) -> np.ndarray:
    """A training step: the lives of a third nest, as activations do; the rest is soon gone."""
    rng = np.random.default_rng(seed)
    held = count // 3
    end = 6 * held
    start = np.arange(held)
    long = np.stack([start, end - 2 * start, rng.integers(1, 64, held) * 512], 1)
    lower = rng.integers(0, end - 4, count - held)
    size = rng.integers(1, 256, count - held) * 512
    return np.concatenate(
        [long, np.stack([lower, lower + rng.integers(1, 4, len(lower)), size], 1)]
    )


def measure(
    name: str, rows: Any, capacity: int | None, limit_s: float, runs: int
) -> dict[str, Any]:
    """Pack once or more, check, and return a row."""
    times = []
    for _ in range(runs):
        began = time.process_time()
        packing = arrange(rows, capacity, time_limit_s=limit_s)
        times.append(time.process_time() - began)
    buffers = rows.tolist() if isinstance(rows, np.ndarray) else rows
    assert check_packing(buffers, packing.offsets, capacity) == packing.height
    problem = read_problem(rows)
    live = problem.lower_bound
    greedy: dict[str, float | None] = dict.fromkeys(f"greedy_{rule}" for rule in RULES)
    if len(problem) < 10_000:
        for rule in RULES:
            ends = first_fit(problem, order_by(problem, rule)) + problem.size
            greedy[f"greedy_{rule}"] = round(int(ends.max()) / live, 4)
    return {
        "what": name,
        "buffers": len(problem),
        "capacity": capacity,
        "time_limit_s": limit_s,
        "seconds": round(statistics.median(times), 3),
        "height": packing.height,
        "max_live": live,
        "height_over_bound": round(packing.height / live, 4),
        "proved_lowest": packing.proved,
        **greedy,
    }


def measurements(quick: bool) -> list[Callable[[], dict[str, Any]]]:
    """Return what is to be measured."""
    runs = 1 if quick else 5
    work: list[Callable[[], dict[str, Any]]] = []
    for path in FILES:
        rows = read_csv(path).buffers
        name = f"minimalloc {path.name[0]}"
        work.append(lambda n=name, r=rows: measure(n, r, CAPACITY, 300.0, runs))
        limit_s = 5.0 if quick else 60.0
        work.append(lambda n=name, r=rows, s=limit_s: measure(f"{n}, lowest", r, None, s, 1))
    for seed in range(3 if quick else 10):
        rows = scattered(300, seed)
        work.append(lambda r=rows, n=seed: measure(f"scattered {n}", r, None, 5.0, 1))
    # With no time for a search: the first greedy rule, by size.
    for make in (scattered, nested):
        count = 10_000 if quick else 100_000
        rows = make(count, 0)
        work.append(lambda r=rows, n=make.__name__: measure(f"{n}, greedy", r, None, 0.0, 1))
    return work


def picture(path: Path) -> None:
    """File A, time across and addresses up: packed, and by the best greedy rule."""
    from matplotlib.patches import Rectangle

    plt = pyplot()

    rows = read_csv(FILES[0]).buffers
    problem = read_problem(rows)
    fits = (first_fit(problem, order_by(problem, rule)) for rule in RULES)
    greedy = min(fits, key=lambda offsets: (offsets + problem.size).max())
    packed = np.array(arrange(rows, CAPACITY, time_limit_s=300).offsets)
    figure, panels = plt.subplots(1, 2, figsize=(12, 5.6), sharey=True, layout="constrained")
    longest = problem.upper.max()
    colours = plt.get_cmap("viridis")((problem.upper - problem.lower) / longest)
    for panel, offsets, name in zip(
        panels, (greedy, packed), ("best greedy rule", "sn_memory.pack"), strict=True
    ):
        for at, offset in enumerate(offsets):
            panel.add_patch(
                Rectangle(
                    (problem.lower[at] / 1000, offset / 1024),
                    (problem.upper[at] - problem.lower[at]) / 1000,
                    problem.size[at] / 1024,
                    facecolor=colours[at],
                    edgecolor="white",
                    linewidth=0.5,
                )
            )
        height = (offsets + problem.size).max()
        panel.axhline(CAPACITY / 1024, color="#c0392b", linestyle=(0, (5, 3)), linewidth=1.4)
        panel.set_title(f"{name}: {height / 1024:.0f} KiB, {height / CAPACITY:.2f} of the capacity")
        panel.set_xlim(0, longest / 1000)
        panel.set_xlabel("time (thousands); light: long-lived, dark: short-lived")
    panels[0].set_ylim(0, (greedy + problem.size).max() / 1024 * 1.02)
    panels[0].set_ylabel("address (KiB)")
    panels[1].text(
        longest / 1000 * 0.01,
        CAPACITY / 1024 * 1.015,
        "capacity, and the most bytes that are live at one moment",
        color="#c0392b",
    )
    figure.suptitle(
        f"MiniMalloc's file A: {len(rows)} buffers in no more bytes than are live at one moment",
        fontweight="bold",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--png", type=Path, metavar="FILE", help="only draw file A")
    parser.add_argument("--quick", action="store_true", help="one run of each, shorter limits")
    args = parser.parse_args()
    if args.png:
        picture(args.png)
        return
    where = origin()
    rows = []
    print(f"{'what':24} {'buffers':>8} {'seconds':>8} {'height/bound':>12} lowest proved")
    for work in measurements(args.quick):
        row = work()
        rows.append(row | where)
        print(
            f"{row['what']:24} {row['buffers']:8} {row['seconds']:8.3f} "
            f"{row['height_over_bound']:12.4f} {'yes' if row['proved_lowest'] else 'no'}",
            flush=True,
        )
    save(args.json, rows)


if __name__ == "__main__":
    main()
