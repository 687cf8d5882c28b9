"""Settings of a GossipOptimizer that are not legal together, in any framework."""

from __future__ import annotations

import pytest

from sn_compress import CompressError, codec
from sn_compress.gossip import topology
from sn_compress.gossip.settings import GossipSettings

LEGAL = {
    "topology": "exact", "overlap": True,
    "codec": None, "momentum": 0, "pull": 0.1, "limit": None, "every": 10,
}  # fmt: skip
TOPK = codec("topk", theta=0.98)


@pytest.mark.parametrize("changed", [
    {},
    {"momentum": 8, "limit": 0.1},
    {"codec": TOPK, "limit": 0.1, "pull": 1},
    {"every": 0},
])  # fmt: skip
def test_legal(changed):
    GossipSettings(**(LEGAL | changed))


@pytest.mark.parametrize(("changed", "told"), [
    ({"momentum": -1}, "momentum=-1"),
    ({"every": -1}, "every=-1"),
    ({"pull": 0}, "pull=0"),
    ({"pull": 1.1}, "pull=1.1"),
    ({"limit": 0.0}, "limit=0.0"),
    ({"limit": float("nan")}, "limit=nan"),
    ({"limit": 0.1, "every": 0}, "every=0"),
    ({"codec": TOPK, "momentum": 1}, "sent uncompressed"),
])  # fmt: skip
def test_not_legal(changed, told):
    with pytest.raises(CompressError, match=told):
        GossipSettings(**(LEGAL | changed))


def test_a_topology_by_name_or_of_as_many_ranks():
    def graph_of(topology, ranks, codec):
        return GossipSettings(**LEGAL | {"topology": topology, "codec": codec}).graph(ranks)

    assert graph_of("exact", 6, TOPK).ranks == 6
    own = topology("hypercube", 4)
    assert graph_of(own, 4, None) is own
    with pytest.raises(CompressError, match="for 8 ranks"):
        graph_of(own, 8, None)
    with pytest.raises(CompressError, match="rotating"):
        graph_of(topology("dissemination", 4, rotate=True), 4, TOPK)
