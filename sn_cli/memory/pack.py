"""The command `pack`: places the buffers of a CSV file in one arena."""

from __future__ import annotations

import argparse
from typing import Any

from sn_memory import arrange, check_packing
from sn_memory.base.progress import progress_output
from sn_memory.base.sizes import parse_bytes, show_bytes
from sn_memory.pool.problem import read_csv, write_csv

from ..command import Answer, add_command, output_file


def add_pack(commands: Any) -> None:
    """Add the command to its group."""
    parser = add_command(
        commands,
        "pack",
        _pack,
        help="place buffers with known lifetimes in one arena",
        epilog="exit code 1: no packing within --capacity was found; the message states whether "
        "one can exist",
    )
    parser.add_argument("buffers", help="CSV file: id,lower,upper,size and optionally alignment")
    parser.add_argument("--capacity", help='bytes, or "1MiB"; default: the fewest that it finds')
    parser.add_argument(
        "-o", "--output", type=output_file, help="CSV file to write: the rows with their offsets"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _pack(options: argparse.Namespace) -> Answer:
    file = read_csv(options.buffers)
    capacity = None if options.capacity is None else parse_bytes(options.capacity)
    with progress_output(not options.quiet):
        packing = arrange(file.buffers, capacity, time_limit_s=options.time_limit)
    check_packing(file.buffers, packing.offsets, capacity)
    if options.output is not None:
        write_csv(options.output, file.ids, file.buffers, packing.offsets)
    above = packing.height / packing.lower_bound - 1 if packing.lower_bound else 0.0
    best = "no packing is lower" if packing.proved else f"{above:.2%} above the lower bound"
    data = {
        "buffers": len(file.buffers),
        "height_bytes": packing.height,
        "lower_bound_bytes": packing.lower_bound,
        "proved": packing.proved,
        "seconds": packing.seconds,
    }
    return Answer(
        f"{len(file.buffers)} buffers in {packing.height} bytes ({show_bytes(packing.height)}), "
        f"{best}; {packing.seconds:.2f} s",
        data,
    )
