"""Graphs for the commands: a file, or one that comes with the package."""

from __future__ import annotations

import os
from importlib.resources import files

from sn_memory import Graph, GraphError

EXAMPLES = {
    "alexnet": "AlexNet, batch 512",
    "resnet50": "ResNet-50, batch 64",
    "transformer12": "a decoder of 12 layers, batch 4",
    "unet": "U-Net, batch 8",
}
"""Names and descriptions of the shipped graphs, made by scripts/example_graphs.py."""

GRAPH_HELP = "graph file (docs/graph_format.md), or a shipped example: " + ", ".join(EXAMPLES)


def read_graph(named: str) -> Graph:
    """Return the graph of a file, or an example graph if there is no file of that name.

    Raises GraphError for what is no graph, and where there is neither; OSError for what cannot be
    read.
    """
    if named in EXAMPLES and not os.path.exists(named):
        text = files("sn_cli").joinpath("graphs", f"{named}.json").read_text(encoding="utf-8")
        return Graph.from_json(text)
    try:
        return Graph.from_json(os.fspath(named))
    except FileNotFoundError:
        raise GraphError(
            f"there is no file {named}; expected a graph file, as `sn memory export` writes it, or "
            f"one of the examples {', '.join(EXAMPLES)}."
        ) from None
