"""Shared by benchmarks of peaks, for both frameworks: peaks by the allocator, columns, rows."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from machine import origin
from rows_file import flags, load, path_of, save

ROOT = Path(__file__).resolve().parent.parent


def make_rows(
    purpose: str,
    file: str,
    nets: Collection[str],
    levels: Sequence[Any],
    quick: str,
    row_of: Callable[[str, Any, int], dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], str],
    others: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Read the command line, make a row for each net and level, save them, print the table.

    purpose : what the command is for
    file : name of the rows' file
    nets, levels : all; --quick takes the net `quick` and the first level
    row_of : of a net, a level, and how many steps are timed
    others : nets that run only if `--nets` names them, with their levels
    """
    others = others or {}
    parser = flags(purpose)
    parser.add_argument("--quick", action="store_true", help="one net, few steps")
    parser.add_argument(
        "--nets", nargs="+", choices=[*nets, *others], help="default: all small nets"
    )
    args = parser.parse_args()
    path = path_of(args, ROOT / "benchmarks/results" / file)
    about = origin()
    chosen = args.nets or ([quick] if args.quick else list(nets))
    rows = [
        row_of(name, level, 2 if args.quick else 10) | about
        for name in chosen
        for level in others.get(name, levels)[: 1 if args.quick else None]
    ]
    save(path, [row for row in load(path) if row["net"] not in chosen] + rows)
    print(f"{table(rows)}\n\nrows: {path}")


def make_nets(
    parser: argparse.ArgumentParser,
    file: str,
    nets: Collection[str],
    methods: Sequence[str],
    rows_of: Callable[[str, argparse.Namespace], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], str],
    chosen: Sequence[str] | None = None,
) -> None:
    """Read the command line, make the rows of each net together, save them, print the table.

    parser : with --json, and what else may be asked for
    file : name of the rows' file
    nets, methods : all, in the order of the rows; --quick takes the first net
    rows_of : of a net, and what was asked for
    chosen : nets that run if none is named; all
    """
    parser.add_argument("--quick", action="store_true", help="the first net, one short round")
    parser.add_argument("--nets", nargs="+", choices=[*nets], default=[*(chosen or nets)])
    args = parser.parse_args()
    path = path_of(args, ROOT / "benchmarks/results" / file)
    about = origin()
    order = {(net, method): at for at, (net, method) in enumerate(product(nets, methods))}
    for net in [*nets][:1] if args.quick else args.nets:
        new_rows = [row | about for row in rows_of(net, args)]
        rows = [row for row in load(path) if row["net"] != net] + new_rows
        rows.sort(key=lambda row: order[row["net"], row["method"]])
        save(path, rows)
    print(f"{table(rows)}\n\nrows: {path}")


def activation_bytes(loss: Callable[[], Any], weights: Sequence[Any]) -> tuple[int, int]:
    """Return bytes at the end of a forward pass and the most of a step, by the CPU's allocator.

    Kernels' scratch is among them, and weights' gradients are not, once they are done or before.
    """
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile, record_function

    for weight in weights:
        weight.grad = None
    gc.collect()
    gc.disable()  # what was there before and goes meanwhile would count as given back
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            value = loss()
            with record_function("our backward pass"):
                value.backward()
    finally:
        gc.enable()
    tree: list[Any] = watched.profiler.kineto_results.experimental_event_tree()
    events, turn_ns = [], 0
    while tree:
        event = tree.pop()
        tree += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields))
        elif event.name == "our backward pass":
            turn_ns = event.start_time_ns
    events.sort(key=lambda event: event[0])
    last = {fields.ptr: at for at, (_, fields) in enumerate(events) if fields.alloc_size > 0}
    gradients = {last[weight.grad.data_ptr()] for weight in weights if weight.grad is not None}
    sizes: dict[int, int] = {}
    now = most = held = 0
    for at, (time_ns, fields) in enumerate(events):
        if fields.alloc_size > 0 and at not in gradients:
            sizes[fields.ptr] = fields.alloc_size
            now += fields.alloc_size
        elif fields.alloc_size < 0:  # of what was there before, nothing is known
            now -= sizes.pop(fields.ptr, 0)
        most = max(most, now)
        held = now if time_ns < turn_ns else held
    return held, most


def cells(row: dict[str, Any]) -> list[str]:
    """The last cells of a table: two peaks in MiB, what that is less, milliseconds a step."""
    plain, compressed = row["plain_peak_bytes"], row["peak_bytes"]
    peaks = f"{plain / 2**20:.2f}, {compressed / 2**20:.2f}"
    times = f"{1e3 * row['plain_step_s']:.0f}, {1e3 * row['step_s']:.0f}"
    return [peaks, f"{1 - compressed / plain:.0%}", times]
