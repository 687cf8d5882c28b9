"""Gossip training of Keras models on TensorFlow, over Horovod; see `optimizer`."""

from .loaders import ring_shuffle
from .optimizer import Consensus, GossipOptimizer

__all__ = ["Consensus", "GossipOptimizer", "ring_shuffle"]
