"""The command `pack`: addresses for the buffers of a CSV file."""

from __future__ import annotations

import argparse
from typing import Any

from ..base.sizes import parse_bytes, show_bytes
from ..check.packing import check_packing
from ..pool.csv import read_csv, write_csv
from ..pool.pack import arrange


def add_pack(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    pack = commands.add_parser("pack", help="addresses in one arena for buffers with lifetimes")
    pack.add_argument("buffers", help="CSV file: id,lower,upper,size and perhaps alignment")
    pack.add_argument("--capacity", help='bytes, or "1MiB"; without it as few as can be found')
    pack.add_argument("-o", "--output", help="where the same rows go, with their offsets")
    pack.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    pack.set_defaults(command=_pack)


def _pack(options: argparse.Namespace) -> str:
    file = read_csv(options.buffers)
    capacity = None if options.capacity is None else parse_bytes(options.capacity)
    packing = arrange(file.buffers, capacity, time_limit_s=options.time_limit)
    check_packing(file.buffers, packing.offsets, capacity)
    if options.output is not None:
        write_csv(options.output, file.ids, file.buffers, packing.offsets)
    above = packing.height / packing.lower_bound - 1 if packing.lower_bound else 0.0
    best = "no packing is lower" if packing.proved else f"{above:.2%} above the lower bound"
    return (
        f"{len(file.buffers)} buffers in {packing.height} bytes ({show_bytes(packing.height)}), "
        f"{best}; {packing.seconds:.2f} s"
    )
