"""Gossip training of Keras models on TensorFlow, over Horovod; see `optimizer`."""

from .optimizer import Consensus, GossipOptimizer
from .ring import ring_shuffle

__all__ = ["Consensus", "GossipOptimizer", "ring_shuffle"]
