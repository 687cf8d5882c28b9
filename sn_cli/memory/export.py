"""The command `export`: writes the graph of a model's training step to a file."""

from __future__ import annotations

import argparse
from typing import Any

from sn_memory.base.progress import progress_output
from sn_memory.base.sizes import show_bytes
from sn_memory.graph.liveness import peak

from ..command import Answer, add_command, output_file
from .naming import MODEL_HELP, read_model


def add_export(commands: Any) -> None:
    """Add the command to its group."""
    parser = add_command(
        commands, "export", _export, help="write the graph of a model's training step"
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("-o", "--output", type=output_file, required=True, help="the graph file")
    parser.add_argument(
        "--times",
        choices=("measured", "computed"),
        default="measured",
        help="times of ops: measured here (default), or computed from bytes and flops",
    )
    parser.add_argument("--device", help="a named device to trace the step for, such as h100")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _export(options: argparse.Namespace) -> Answer:
    setup = read_model(options.model).at()
    with progress_output(not options.quiet):
        traced = setup.rim.trace(
            setup.model,
            setup.sample,
            profile=options.times == "measured",
            optimizer=setup.optimizer,
            device=options.device,
        )
    graph = traced.graph
    graph.to_json(options.output)
    highest = peak(graph).bytes
    data = {
        "output": options.output,
        "ops": len(graph.ops),
        "storages": len(graph.storages),
        "peak_bytes": highest,
    }
    return Answer(
        f"{options.output}: {len(graph.ops)} ops, {len(graph.storages)} storages, "
        f"peak {show_bytes(highest)}",
        data,
    )
