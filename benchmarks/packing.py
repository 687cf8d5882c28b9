"""Seconds of packing activations on the host: `python -m benchmarks packing`.

Floats to codes and back by groups.pack and groups.unpack, as compress_activations calls them, into
memory that is there; and a copy of the same bytes. Processor time on one thread, in alternation.
GB/s are of the tensor's own bytes, in its own type, in the best of all rounds: a processor that is
shared runs half as fast again at one time as at another, so every row is measured in each of
several passes over all of them.

contiguous       groups of 256 as they lie
rows             groups within rows of 768, as those of a layer norm
channels last    [images, 256, 28, 28] by channels, as a batch norm's
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import origin
from rows_file import save
from tables import markdown, put_into
from timing import interleave, timed

from sn_compress.ops import groups
from sn_memory.torch.activations import packing

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "activations.md"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (2, 4, 8)
LAYOUTS = ("contiguous", "rows", "channels last")
MIB = (4, 64)  # within the last cache, and far beyond
ROW, IMAGE = 768, (28, 28, 256)
PASSES, ROUNDS = 8, 8
Call = Callable[[], Any]


def calls(dtype: torch.dtype, bits: int, layout: str, mib: int) -> tuple[int, dict[str, Call]]:
    """Bytes of a tensor, and what to time."""
    unit = math.prod(IMAGE) if layout == "channels last" else ROW
    n = mib * 2**20 // dtype.itemsize // unit * unit
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty_like(x)
    run = ROW if layout == "rows" else 0
    source, target = x, out
    if layout == "channels last":
        source, target = (tensor.view(-1, *IMAGE).permute(3, 0, 1, 2) for tensor in (x, out))
        run = source[0].numel()
    values, back = packing.as_numpy(source), packing.as_numpy(target)
    ng, width = groups.Parts(n, bits, packing.GROUP, run).at(n)
    into = np.empty(ng, np.float32), np.empty(ng, np.uint16), np.empty(width, np.uint8)
    chance = math.inf, (1, 2), 1
    pack = partial(groups.pack, values, bits, packing.GROUP, *chance, into, run, look=False)
    unpack = partial(groups.unpack, *into, n, bits, packing.GROUP, 1, back, run)
    return x.nbytes, {"pack": pack, "unpack": unpack, "copy": partial(out.copy_, x)}


def row(dtype: torch.dtype, bits: int, layout: str, mib: int, rounds: int) -> dict[str, Any]:
    """One row of one pass: GB/s of each call."""
    nbytes, by_name = calls(dtype, bits, layout, mib)
    steps = {name: partial(timed, call) for name, call in by_name.items()}
    taken = interleave(steps, rounds, settle=1)  # the first touches memory for the first time
    best = {name: min(seconds) for name, seconds in taken.items()}
    about = {"dtype": str(dtype)[6:], "bits": bits, "layout": layout, "mib": mib}
    return about | {f"{name}_gb_s": round(nbytes / took / 1e9, 2) for name, took in best.items()}


def faster(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The row of the better speeds of two passes."""
    return a | {key: max(a[key], b[key]) for key in a if key.endswith("_gb_s")}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: of each kind the tensors of both sizes."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        line = cells.setdefault((row["dtype"], row["layout"]), [])
        line.append(f"{row['pack_gb_s']:.1f}, {row['unpack_gb_s']:.1f} ({row['copy_gb_s']:.1f})")
    head = ["type", "layout", *(f"{mib} MiB, {bits} bits" for mib in MIB for bits in BITS)]
    return markdown(head, [[*kind, *line] for kind, line in cells.items()])


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small tensors, few rounds")
    quick = parser.parse_args().quick
    about = origin()
    folder = ROOT / "benchmarks" / ("out" if quick else "results")
    cases = list(product(DTYPES, LAYOUTS, MIB[: 1 if quick else None], BITS))
    rows: list[dict[str, Any]] = []
    for _ in range(1 if quick else PASSES):
        again = [
            row(dtype, bits, layout, mib, 1 if quick else ROUNDS) | about
            for dtype, layout, mib, bits in cases
        ]
        rows = [faster(*pair) for pair in zip(rows, again, strict=True)] if rows else again
        save(folder / "packing.json", rows)
    print(table(rows))
    if not quick:
        put_into(PAGE, "packing", table(rows))


if __name__ == "__main__":
    main()
