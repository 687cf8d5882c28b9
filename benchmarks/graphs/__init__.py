"""Training graphs of known networks, built from the layer tables of their papers.

from graphs import resnet
graph = resnet(batch=64, depth=50).graph()      # a sn_memory.Graph, forward, backward, update
"""

from .branched import densenet121, inception_v4
from .classic import alexnet, unet, vgg16
from .device import K40_LIKE, V100_LIKE
from .layered import layered
from .net import Net
from .residual import cifar_resnet, deep_stages, resnet
from .sequence import layers_for_ops, transformer

__all__ = [
    "K40_LIKE",
    "V100_LIKE",
    "Net",
    "alexnet",
    "cifar_resnet",
    "deep_stages",
    "densenet121",
    "inception_v4",
    "layered",
    "layers_for_ops",
    "resnet",
    "transformer",
    "unet",
    "vgg16",
]
