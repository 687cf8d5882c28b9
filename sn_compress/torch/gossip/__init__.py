"""Gossip training of torch models, over Horovod or torch.distributed; see `optimizer`."""

from .optimizer import GossipOptimizer
from .ring import ring_shuffle

__all__ = ["GossipOptimizer", "ring_shuffle"]
