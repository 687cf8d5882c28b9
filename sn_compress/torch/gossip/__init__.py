"""Gossip training of torch models, over Horovod or torch.distributed; see `optimizer`."""

from .loaders import ring_shuffle
from .optimizer import GossipOptimizer

__all__ = ["GossipOptimizer", "ring_shuffle"]
