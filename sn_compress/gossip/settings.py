"""The settings of a GossipOptimizer that no framework has a say in: which are legal together."""

from __future__ import annotations

from typing import Any

from ..base.errors import CompressError
from .topology import Topology
from .topology import topology as make_topology


def check(
    *, average: str, codec: Any, momentum: int, pull: float, limit: float | None, every: int
) -> None:
    """Raise CompressError for settings that are not legal; see sn_compress.torch.gossip."""
    if average not in ("weights", "gradients"):
        raise CompressError(f"average={average!r}; expected 'weights' or 'gradients'")
    if average == "gradients" and (codec or momentum or limit is not None):
        raise CompressError(
            "average='gradients' with codec, momentum or limit; these are of weights. Leave them, "
            "or average weights."
        )
    if momentum < 0 or every < 0 or not 0 < pull <= 1:
        raise CompressError(
            f"momentum={momentum}, every={every}, pull={pull}; expected 0 or more, 0 or more and "
            "(0, 1]"
        )
    if limit is not None and (not limit > 0 or not every):
        raise CompressError(f"limit={limit}, every={every}; expected both above 0")
    if codec and momentum:
        raise CompressError(
            "codec with momentum: it would travel in full. Leave it to consensus(): momentum=0."
        )


def graph_of(topology: str | Topology, ranks: int, codec: Any) -> Topology:
    """The topology of that name, or the one given, if it is one for these ranks."""
    graph = make_topology(topology, ranks) if isinstance(topology, str) else topology
    if graph.ranks != ranks:
        raise CompressError(f"{graph!r} for {ranks} ranks; expected one of as many")
    if codec and graph.rotate:
        raise CompressError(
            "codec with a rotating topology: a copy of the model for every other rank, and twice. "
            "Use one that does not rotate."
        )
    return graph
