"""Energy lost at each size: every codec on real gradients, and ours at the same bytes.

    python -m benchmarks rate_distortion [--quick] [--json FILE] [--png FILE]

For every saved gradient tensor (benchmarks/gradients.py) and every rival and preset: the bytes of
its payload and the fraction of the energy it loses (NMSE); then `auto` is given no more bytes than
that and measured on the same tensor. Codecs that warm up see the three gradients before; error
memories are emptied each time, so that only the codec is compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from gradients import RUN, load
from machine import origin
from pictures import pyplot
from rivals.codecs import codec as codec_of
from rows_file import flags, save

from sn_compress.text_table import text_table

RIVALS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("fft", "paper", {"theta": 0.9}),
    ("topk", "grace", {"theta": 0.9}),
    ("topk", "grace", {"theta": 0.99}),
    ("topk", "compact", {}),
    ("topk", "compact", {"theta": 0.99}),
    ("dgc", "paper", {}),
    ("demo", "paper", {}),
    ("demo", "paper", {"topk": 8}),
    ("demo", "paper", {"topk": 2}),
    ("qsgd", "grace", {}),
    ("qsgd", "paper", {}),
    ("qsgd", None, {"levels": 1}),
    ("terngrad", "grace", {}),
    ("terngrad", "paper", {}),
    ("onebit", None, {}),
    ("onebit", "ef-sign", {}),
    ("powersgd", "torch", {"rank": 1}),
    ("powersgd", "torch", {"rank": 2}),
    ("powersgd", "torch", {"rank": 4}),
    ("fp16", None, {}),
    ("bf16", None, {}),
]
RATIOS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def forget(state: Any) -> Any:
    """Empty the error memory of a state, and keep what a warm start needs."""
    if hasattr(state, "inner"):  # auto
        forget(state.inner)
    elif hasattr(state, "memory"):  # low rank
        state.memory[:] = 0
    elif isinstance(state, list):  # arrays; PowerSGD keeps its factor behind the memory
        for part in state[:1] if len(state) == 2 and state[-1].ndim == 2 else state:
            part[...] = 0
    return state


def lost(codec: Any, run: list[np.ndarray]) -> float:
    """NMSE on the last gradient of a run, after the ones before."""
    state = codec.new_state(run[0].size)
    for vector in run:
        payload = codec.encode(vector, state=forget(state))
    target = run[-1].astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.square(target - codec.decode(payload)).sum()
    return float(error / np.square(target).sum())


def make(name: str, preset: str | None, settings: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """The codec, or None where it does not apply to this shape."""
    if name in ("powersgd", "demo"):  # both see matrices only
        rows, columns = shape[0], int(np.prod(shape[1:]))
        if min(rows, columns) < settings.get("rank", 1):
            return None
        settings = settings | {"shape": (rows, columns)}
    return codec_of(name, preset=preset, **settings)


def measure(gradients: dict[str, np.ndarray], steps: set[str]) -> list[dict[str, Any]]:
    """One row per tensor, step and rival; `auto` rows have no rival."""
    tensors = sorted({tuple(key.split("/", 3)[i] for i in (0, 1, 3)) for key in gradients})
    tensors = [tensor for tensor in tensors if tensor[1] in steps]
    rows = []
    for index, (net, step, name) in enumerate(tensors, 1):
        print(f"[{index}/{len(tensors)}] {net} step {step} {name}", file=sys.stderr, flush=True)
        run = [gradients[f"{net}/{step}/{i}/{name}"] for i in range(RUN)]
        shape, run = run[0].shape, [g.reshape(-1) for g in run]
        about = {"net": net, "step": int(step), "tensor": name, "n": run[0].size}

        def auto(ratio: float, run: list[np.ndarray] = run, shape: Any = shape) -> float:
            return lost(codec_of("auto", ratio=ratio, shape=shape, every=1), run)

        for method, preset, settings in RIVALS:
            codec = make(method, preset, settings, shape)
            if codec is None:
                continue
            nbytes = codec.payload_bytes(run[0].size)
            ratio = 4 * run[0].size / nbytes
            if ratio <= 1.01:
                continue  # larger than the tensor itself
            rows.append(
                about
                | {
                    "method": method,
                    "preset": preset,
                    "settings": json.dumps(settings),
                    "bytes": nbytes,
                    "ratio": ratio,
                    "nmse": lost(codec, run),
                    "auto_nmse": auto(ratio),
                }
            )
        rows += [
            about | {"method": "auto", "preset": None, "settings": "", "ratio": r, "nmse": auto(r)}
            for r in RATIOS
        ]
    return [row | origin() for row in rows]


def label(row: dict[str, Any]) -> str:
    """The name of a rival's line."""
    settings = json.loads(row["settings"] or "{}")
    extra = "".join(f" {key} {value}" for key, value in settings.items())
    return row["method"] + (f" ({row['preset']})" if row["preset"] else "") + extra


def table(rows: list[dict[str, Any]]) -> str:
    """Each rival: its ratio and loss, ours at its bytes, and how often ours loses no more."""
    groups = defaultdict(list)
    for row in rows:
        if row["method"] != "auto":
            groups[label(row)].append(row)
    lines = []
    for name, group in groups.items():
        wins = sum(row["auto_nmse"] <= row["nmse"] for row in group)
        ratio, nmse, ours = (
            statistics.median(row[key] for row in group) for key in ("ratio", "nmse", "auto_nmse")
        )
        lines.append([name, f"{ratio:.1f}", f"{nmse:.2g}", f"{ours:.2g}", f"{wins}/{len(group)}"])
    rivals = [row for group in groups.values() for row in group]
    wins = sum(row["auto_nmse"] <= row["nmse"] for row in rivals)
    return (
        f"{text_table(('rival', 'ratio', 'NMSE', 'ours', 'no worse'), lines)}\n"
        f"all: ours loses no more in {wins} of {len(rivals)}, {wins / len(rivals):.1%}"
    )


def worse(rows: list[dict[str, Any]]) -> str:
    """Where ours loses more than a rival."""
    lost = [r for r in rows if r["method"] != "auto" and r["auto_nmse"] > r["nmse"]]
    return "\n".join(
        f"  {label(r)} on {r['net']} {r['tensor']} step {r['step']} ({r['n']} elements, ratio "
        f"{r['ratio']:.0f}): {r['nmse']:.3g}, ours {r['auto_nmse']:.3g}"
        for r in lost
    )


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratio against NMSE, the median over tensors: every rival a mark, ours a line."""
    plt = pyplot()

    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    marks = dict(zip(sorted({r["method"] for r in rows} - {"auto"}), "osD^vPXd<>h8", strict=False))
    for panel, net in zip(panels, sorted({r["net"] for r in rows}), strict=True):
        ours = [[r["nmse"] for r in rows if r["net"] == net and r["method"] == "auto"
                 and r["ratio"] == ratio] for ratio in RATIOS]  # fmt: skip
        low, middle, high = ([statistics.quantiles(v, n=4)[q] for v in ours] for q in range(3))
        panel.fill_between(RATIOS, low, high, color="#d55e00", alpha=0.15, lw=0)
        panel.plot(RATIOS, middle, color="#d55e00", lw=2.5, label="auto (ours), quartiles shaded")
        for method, mark in marks.items():
            groups = defaultdict(list)
            for r in rows:
                if r["net"] == net and r["method"] == method:
                    groups[label(r)].append(r)
            points = [
                [statistics.median(r[key] for r in group) for key in ("ratio", "nmse")]
                for group in groups.values()
            ]
            if points:
                panel.plot(*zip(*points, strict=True), mark, ms=8, mec="white", label=method)
        panel.set(xscale="log", yscale="log", xlabel="ratio (bytes before / bytes after)",
                  title=f"gradients of the {net}")  # fmt: skip
        panel.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("energy lost (NMSE); lower is better")
    panels[1].legend(loc="lower right", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="gradients of one step only")
    args = parser.parse_args()
    steps = {"200"} if args.quick else {"5", "60", "200", "400"}
    rows = measure(load(), steps)
    print(table(rows))
    if report := worse(rows):
        print(f"worse than a rival:\n{report}")
    save(args.json, rows)
    if args.png:
        picture(rows, args.png)


if __name__ == "__main__":
    main()
