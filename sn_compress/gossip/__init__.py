"""Gossip training: each rank exchanges with one other per step, whatever the number of ranks.

Framework-independent; the rims are `sn_compress.torch.gossip` and `sn_compress.tensorflow.gossip`.
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
