"""Settings of a GossipOptimizer in any framework: what is legal, and must be equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..codecs.base import Codec
from ..consistency import Fingerprint, plain
from ..errors import CompressError
from .differences import Differences, Shape
from .topology import Topology, topology

# Horovod matches messages by name, so two optimizers on the same ranks need distinct names, and
# all of these ranks must choose the same ones.
_message_counts: Counter[tuple[str, tuple[int, ...]]] = Counter()


@dataclass(frozen=True)
class GossipSettings:
    """Settings of one optimizer; see sn_compress.torch.gossip.GossipOptimizer.

    Raises CompressError for illegal settings or combinations.
    """

    topology: str | Topology
    momentum: int
    overlap: bool
    codec: Codec | Callable[[Shape], Codec] | None
    pull: float
    limit: float | None
    every: int

    def __post_init__(self) -> None:
        if self.momentum < 0 or self.every < 0 or not 0 < self.pull <= 1:
            raise CompressError(
                f"momentum={self.momentum}, every={self.every}, pull={self.pull}; expected 0 or "
                "more, 0 or more and (0, 1]"
            )
        if self.limit is not None and (not self.limit > 0 or not self.every):
            raise CompressError(f"limit={self.limit}, every={self.every}; expected both above 0")
        if self.codec and self.momentum:
            raise CompressError(
                "got a codec with momentum, which would be sent uncompressed. Set momentum=0 and "
                "average it with consensus()."
            )

    @property
    def factor(self) -> float:
        """The factor on every mixing weight."""
        return self.pull if self.codec else 1.0

    def copies(self, shapes: Sequence[Shape]) -> Differences | None:
        """Return the copies for a message of tensors of these shapes; None without a codec."""
        return None if self.codec is None else Differences(shapes, self.codec)

    def graph(self, ranks: int) -> Topology:
        """Return the topology, created if given by name; CompressError for other ranks."""
        chosen = self.topology
        graph = topology(chosen, ranks) if isinstance(chosen, str) else chosen
        if graph.ranks != ranks:
            raise CompressError(
                f"got {graph!r} for {ranks} ranks; expected a topology of {ranks} ranks"
            )
        if self.codec and graph.rotate:
            raise CompressError(
                "got a codec with a rotating topology, which needs two copies of the model for "
                "each other rank. Use a topology that does not rotate."
            )
        return graph

    def fingerprint(self, ranks: int) -> Fingerprint:
        """Return the settings that all ranks must share."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["topology"] = self.graph(ranks)
        # The repr of a function from shapes to codecs says nothing about its codecs.
        values["codec"] = self.codec if isinstance(self.codec, Codec) else self.codec is not None
        return [(f"setting {name}", plain(value)) for name, value in values.items()]


def message_prefix(kind: str, process_set: Any) -> str:
    """Return a prefix for the Horovod message names of a new optimizer or loader.

    kind : "gossip" or "ring"
    process_set : Horovod process set, whose ranks create these objects in the same order. Counted
        per set of ranks, because a rank outside of it creates none, but may share other sets with
        the ranks inside
    """
    key = kind, tuple(process_set.ranks or range(process_set.size()))
    _message_counts[key] += 1
    return f"{kind}.{_message_counts[key] - 1}"
