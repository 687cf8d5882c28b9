"""GPU figures of the docs, from benchmarks/results/gpu/*.json; "not measured" without a file.

    PYTHONPATH=.:benchmarks python -m gpu.report

Writes between the markers of docs/cuda.md, docs/gpu.md and docs/torch_memory_measured.md. Nothing
is run. A file of a dry run, which measures nothing, counts as none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from machine import ROOT
from tables import markdown, put_into

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NOT = "not measured"
Result = dict[str, Any]


def load(name: str, folder: Path = RESULTS) -> Result | None:
    """What a section found on a GPU, or None."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result if result.get("device") == "cuda" and result["rows"] else None


def source(result: Result) -> str:
    """Where and of what figures were taken."""
    state = "" if result["state"] == "ok" else f", which {result['state']}: {result['why']}"
    return (
        f"{result['device_name']}, torch {result['torch']}, CuPy {result['cupy'] or 'none'}, "
        f"commit {result['commit']}; `benchmarks/results/gpu/{result['section']}.json` of "
        f"`make gpu`{state}."
    )


def part(result: Result | None, head: Iterable[str], line: Callable[[Result], list[str]],
         which: Callable[[Result], bool] = lambda row: True) -> str:  # fmt: skip
    """A table of a section's rows and their source; one line if there is none."""
    if result is None:
        what = next(iter(head))
        return f"{what[0].upper()}{what[1:]}: {NOT} on a GPU."
    rows = (line(row) for row in result["rows"] if which(row))
    return f"{markdown(head, rows)}\n\n{source(result)}"


def codec(folder: Path) -> str:
    """Of docs/cuda.md: what was asked of the codec's kernels, and what came out."""
    result, watched = load("codec_seconds", folder), load("sanitized", folder)
    fused = (
        {row["method"]: row for row in result["rows"] if row["kind"] == "fused"} if result else {}
    )

    def figure(method: str, key: str, unit: str) -> str:
        return f"{fused[method][key]:.3g} {unit}" if method in fused else NOT

    first, large = "fft theta 0.98", "fft theta 0.9 whole vector"
    both = [figure(large, f"{way}_gb_s", "GB/s") for way in ("encode", "decode")]
    clean = {row["tool"]: row["clean"] for row in watched["rows"]} if watched else {}
    ended = {True: "clean", False: "FOUND SOMETHING"}
    tools = [
        [f"compute-sanitizer {tool}", "clean", ended[clean[tool]] if tool in clean else NOT]
        for tool in ("memcheck", "racecheck")
    ]
    rows = [
        ["fused encode, of the bound of 12 bytes an element", "50 %",
         figure(first, "encode_percent_of_bound", "%")],
        ["fused decode, of the bound of 4 bytes", "40 %",
         figure(first, "decode_percent_of_bound", "%")],
        ["encode against `torch.topk`, same input", "8 x", figure(first, "encode_times_topk", "x")],
        ["encode against a chunked DCT and top-k in torch", "8 x",
         figure(first, "encode_times_chunked_dct", "x")],
        ["whole vector (cuFFT), encode, decode", "", ", ".join(dict.fromkeys(both))],
        *tools,
    ]  # fmt: skip
    text = markdown(("what", "asked for", "result"), rows)
    return f"{text}\n\n{source(result)}" if result else text


def exchange(folder: Path) -> str:
    """Of docs/gpu.md: what each class adds to a step, and whether it waited."""
    steps = part(
        load("exchange_steps", folder),
        ("step of DDP", "ranks, by", "way", "ms", "adds, ms", "launches", "MB brought"),
        lambda row: [
            row["model"], f"{row['ranks']}, {row['backend']}", row["way"], f"{row['step_ms']:.2f}",
            f"{row['added_ms']:+.2f}", str(row["launches"]), f"{row['brought_bytes'] / 1e6:.2f}",
        ],
    )  # fmt: skip
    waits = part(
        load("host_waits", folder),
        ("steps in which the host waited", "for"),
        lambda row: [row["step"], row["waited"] or "nothing"],
    )
    gossip = part(
        load("gossip_steps", folder),
        ("step of gossip, 2 ranks", "way", "ms"),
        lambda row: [row["model"], row["way"], f"{row['step_ms']:.2f}"],
    )
    ranks = part(
        load("horovod_ranks", folder),
        ("step of Horovod, ranks", "way", "ms"),
        lambda row: [str(row["ranks"]), row["way"], f"{row['step_ms']:.2f}"],
        lambda row: "way" in row,
    )
    return "\n\n".join((steps, waits, gossip, ranks))


def planned(folder: Path) -> str:
    """Of docs/torch_memory_measured.md: planned steps, and activations in few bits."""

    def mib(size: int | None) -> str:
        return "" if size is None else f"{size / 2**20:.0f}"

    steps = part(
        load("planned_steps", folder),
        ("planned steps", "way", "predicted, MiB", "allocated", "reserved", "simulated", "off",
         "ms"),
        lambda row: [
            row["model"], row["way"], mib(row.get("predicted_bytes")), mib(row["peak_bytes"]),
            mib(row["reserved_bytes"]), mib(row.get("simulated_reserved_bytes")),
            f"{row['percent_off']:+.1f} %" if "percent_off" in row else "",
            f"{row['step_ms']:.1f}",
        ],
        lambda row: "peak_bytes" in row,
    )  # fmt: skip
    packed = part(
        load("activation_steps", folder),
        ("activations in few bits", "saved, times less", "peak, MiB: plain, packed", "ms: both"),
        lambda row: [
            row["net"], f"{row['ratio']:.1f}",
            f"{row['plain_peak_bytes'] / 2**20:.1f}, {row['measured_peak_bytes'] / 2**20:.1f}",
            f"{1e3 * row['plain_step_s']:.1f}, {1e3 * row['step_s']:.1f}",
        ],
    )  # fmt: skip
    return f"{steps}\n\n{packed}"


PAGES: dict[str, Callable[[Path], str]] = {
    "docs/cuda.md": codec,
    "docs/gpu.md": exchange,
    "docs/torch_memory_measured.md": planned,
}


def main() -> None:
    """Write all pages."""
    for name, make in PAGES.items():
        put_into(ROOT / name, "gpu", make(RESULTS))


if __name__ == "__main__":
    main()
