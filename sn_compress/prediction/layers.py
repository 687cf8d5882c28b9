"""Shapes of the parameters of known networks, in the order of the forward pass.

Exchange costs depend on shapes alone, so a prediction needs no framework and no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ..base.errors import CompressError


@dataclass(frozen=True)
class Layer:
    """One parameter: weights as (out, in, ...), as torch has them."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers."""
        return prod(self.shape)


def layers(model: str) -> list[Layer]:
    """The parameters of a model; CompressError names those there are.

    >>> sum(layer.elements for layer in layers("resnet50"))
    25557032
    """
    if model not in MODELS:
        raise CompressError(f"no layers of {model!r}; known: {', '.join(sorted(MODELS))}")
    return [Layer(name, shape) for name, shape in MODELS[model]()]


def keras_layout(model: Iterable[Layer]) -> list[Layer]:
    """The same parameters as Keras has them: (in, out), and (height, width, in, out).

    >>> keras_layout(layers("resnet50"))[0].shape
    (7, 7, 3, 64)
    """
    return [Layer(layer.name, (*layer.shape[2:], *layer.shape[1::-1])) for layer in model]


_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _weighted(name: str, *shape: int) -> _Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _alexnet() -> _Shapes:
    """Krizhevsky, Sutskever, Hinton 2012, without its split over two GPUs."""
    convolutions = ((96, 3, 11), (256, 96, 5), (384, 256, 3), (384, 384, 3), (256, 384, 3))
    for number, (out, into, side) in enumerate(convolutions, 1):
        yield from _weighted(f"conv{number}", out, into, side, side)
    for number, (out, into) in enumerate(((4096, 9216), (4096, 4096), (1000, 4096)), 6):
        yield from _weighted(f"fc{number}", out, into)


def _vgg16() -> _Shapes:
    """Simonyan, Zisserman 2015, configuration D."""
    into, number = 3, 0
    for out, repeat in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeat):
            number += 1
            yield from _weighted(f"conv{number}", out, into, 3, 3)
            into = out
    for out, into in ((4096, 25088), (4096, 4096), (1000, 4096)):
        number += 1
        yield from _weighted(f"fc{number}", out, into)


def _resnet50() -> _Shapes:
    """He, Zhang, Ren, Sun 2016: bottlenecks of 1x1, 3x3, 1x1, each with a batch norm."""

    def convolution(name: str, out: int, into: int, side: int) -> _Shapes:
        yield f"{name}.weight", (out, into, side, side)
        yield from _weighted(f"{name}.norm", out)

    yield from convolution("conv1", 64, 3, 7)
    into = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from convolution(f"{name}.conv1", width, into, 1)
            yield from convolution(f"{name}.conv2", width, width, 3)
            yield from convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                yield from convolution(f"{name}.down", 4 * width, into, 1)
            into = 4 * width
    yield from _weighted("fc", 1000, 2048)


def _gpt2_small() -> _Shapes:
    """Radford et al. 2019: 12 layers of width 768, output tied to the token embedding."""
    width = 768
    yield "tokens", (50257, width)
    yield "places", (1024, width)
    for block in range(12):
        name = f"block{block}"
        yield from _weighted(f"{name}.norm1", width)
        yield from _weighted(f"{name}.attention.into", 3 * width, width)
        yield from _weighted(f"{name}.attention.out", width, width)
        yield from _weighted(f"{name}.norm2", width)
        yield from _weighted(f"{name}.up", 4 * width, width)
        yield from _weighted(f"{name}.down", width, 4 * width)
    yield from _weighted("norm", width)


MODELS = {
    "alexnet": _alexnet,
    "gpt2-small": _gpt2_small,
    "resnet50": _resnet50,
    "vgg16": _vgg16,
}
"""Name -> its parameters."""
