"""Gossip training: a rank exchanges with one other per step, whatever their number.

The rims are `sn_compress.torch.gossip` and `sn_compress.tensorflow.gossip`; what is here is pure.
"""

from .topology import (
    NAMES,
    Meeting,
    Partner,
    Topology,
    consensus_distance,
    spectral_gap,
    steps_to_exact,
    topology,
)

__all__ = [
    "NAMES",
    "Meeting",
    "Partner",
    "Topology",
    "consensus_distance",
    "spectral_gap",
    "steps_to_exact",
    "topology",
]
