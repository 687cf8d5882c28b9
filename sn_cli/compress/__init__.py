"""`sn compress`: the predicted cost and gain of compression, and the available codecs."""

from __future__ import annotations

from typing import Any

from .gossip import add_gossip
from .methods import add_methods
from .predict import add_predict


def add_compress(groups: Any) -> None:
    """Add the group to those of `sn`."""
    summary = "compress gradients: does it pay, and which methods there are"
    group = groups.add_parser("compress", help=summary, description=f"{summary.capitalize()}.")
    commands = group.add_subparsers(required=True, metavar="predict|methods|gossip")
    add_predict(commands)
    add_methods(commands)
    add_gossip(commands)
