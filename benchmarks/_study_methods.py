"""The methods of the study: from a name, the net's shapes and a ratio to one exchange per tensor.

A ratio is received bytes of a float32 all-reduce over received bytes of the method, at the same
number of ranks, over the tensors that are compressed. Methods with a knob are turned to the ratio
asked for (the knob's finest step may leave them a little under it); the others have their own.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
from rivals.codecs import codec
from rivals.codecs.dgc import DGCCodec
from scipy.fft import dct, idct
from simulated import Exchange, Floats, Frequencies, Gather, Plain, PowerSGD, Shared

from sn_compress import FFTCompression
from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.codecs.base import HEADER_BYTES, Codec
from sn_compress.codecs.fft import FFTCodec
from sn_compress.engine.engine import Engine
from sn_compress.engine.payloads import shares_of
from sn_compress.schedule import Annealed, Constant, Diminishing, Schedule, Warmup


def transform_of(shape: Sequence[int]) -> dict[str, Any]:
    """Settings of FFTCodec: a DCT over the axes chosen, an FFT of blocks where there are none.

    Frequencies catch more than values only along axes whose elements have an order: a kernel's
    height and width. Along a matrix's shorter axis a DCT at least leaves what is sparse along the
    longer one (dead inputs, unused rows of an embedding) as sparse as it was, which blocks of the
    flat vector mix. So do DCTs of a few neighbours, which need no shape.

    >>> transform_of((64, 32, 3, 3))
    {'transform': 'axes', 'shape': (64, 32, 3, 3), 'axes': (2, 3)}
    >>> transform_of((128, 1024))["axes"], transform_of((3, 3, 32, 64))["axes"]
    ((0,), (0, 1))
    >>> transform_of((65536,))
    {'transform': 'fft'}
    """
    shape = tuple(shape)
    axes = _of_kernel(shape) or _of_matrix(shape)
    return {"transform": "axes", "shape": shape, "axes": axes} if axes else {"transform": "fft"}


def _of_kernel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width: torch has them last, TensorFlow first. They are fewer than channels are."""
    if len(shape) < 3:
        return ()
    last, first = tuple(range(2, len(shape))), tuple(range(len(shape) - 2))
    axes = min(last, first, key=lambda some: prod(shape[axis] for axis in some))
    return tuple(axis for axis in axes if shape[axis] > 1)


def _of_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shorter one, the last of equals; none of a vector."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    return (min(reversed(axes), key=lambda axis: shape[axis]),) if len(axes) > 1 else ()


class OfSpans(Gather):
    """DCTs of a few neighbours, the strongest picked out of blocks: what is sparse stays sparse."""

    SPAN = 64

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        n = vectors[0].size

        def coefficients(vector: Floats) -> Floats:
            spans = np.pad(vector, (0, -n % self.SPAN)).reshape(-1, self.SPAN)
            return np.ravel(dct(spans, norm="ortho"))

        mean = super().mean([coefficients(vector) for vector in vectors])
        return np.ravel(idct(mean.reshape(-1, self.SPAN), norm="ortho"))[:n]


# Every method starts with a few plain steps, as PowerSGD and ours do when left alone (with 1,000
# and 10). They are counted apart: in a run as short as these they would be a third of the bytes.
DENSE = 10
Shapes = dict[str, tuple[int, ...]]
Exchanges = dict[str, Exchange]


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor, as PowerSGD takes them."""
    return shape[0], math.prod(shape[1:])


def _payload_budget(shapes: Shapes, ranks: int, ratio: float) -> float:
    """Bytes that all payloads of a rank may have together when they are gathered.

    A float32 all-reduce hands a rank 2 (P - 1) / P * 4 n bytes; a gather P - 1 payloads.
    """
    return 8 * sum(map(math.prod, shapes.values())) / ranks / ratio


def _gather(
    make: Callable[..., Codec], shapes: Shapes, ranks: int, *, seeds: bool = False, **options: Any
) -> Exchanges:
    """One Gather per tensor; `make(shape)` gives a codec, with a seed per rank if it takes one."""
    exchanges: Exchanges = {}
    for index, (name, shape) in enumerate(shapes.items()):
        rank_options = [{"seed": 1000 * index + r} if seeds else {} for r in range(ranks)]
        exchanges[name] = Gather([make(shape, **s) for s in rank_options], **options)
    return exchanges


def _fit(
    make: Callable[..., Codec], knobs: Any, shapes: Shapes, budget: float
) -> Callable[..., Codec]:
    """The codec with the last of the knobs, in rising order of bytes, that fits the budget."""

    def nbytes(knob: Any) -> int:
        return sum(
            make(shape, knob).payload_bytes(math.prod(shape)) - HEADER_BYTES
            for shape in shapes.values()
        )

    low, high = 0, len(knobs)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(knobs[middle]) <= budget else (low, middle)
    return lambda shape: make(shape, knobs[low])


# From a ten-thousandth kept to half; steps of 1 %.
_KEEPS = [1e-4 * 1.01**i for i in range(856)]


def _topk(shapes: Shapes, ranks: int, ratio: float, **settings: Any) -> Exchanges:
    """Top-k with the shortest indices the registry has: 12 bits in chunks of 4,096."""

    def make(shape: tuple[int, ...], keep: float) -> Codec:
        return codec("topk", **{**settings, "theta": 1 - keep})

    budget = _payload_budget(shapes, ranks, ratio)
    return _gather(_fit(make, _KEEPS, shapes, budget), shapes, ranks, headers=False)


def _fft_of(
    shape: tuple[int, ...], theta: float, *, by_shape: bool = True, **settings: Any
) -> Codec:
    """The codec of a tensor under FFTCompression, or one whose transform its shape asks for."""
    codec = FFTCompression.using(**settings).settings.codec_of(theta, 1)
    if not by_shape:
        return codec
    return FFTCodec(theta=theta, bits=codec.bits, mantissa=codec.mantissa, **transform_of(shape))


def _fft(
    shapes: Shapes, ranks: int, ratio: float, *, gathered: type[Gather] = Gather, **settings: Any
) -> Exchanges:
    """FFTCompression at one theta for all tensors; its headers are counted."""

    def make(shape: tuple[int, ...], keep: float) -> Codec:
        return _fft_of(shape, 1 - keep, **settings)

    budget = _payload_budget(shapes, ranks, ratio) - HEADER_BYTES * len(shapes)
    fitted = _fit(make, _KEEPS, shapes, budget)
    return {name: gathered([fitted(shape)] * ranks) for name, shape in shapes.items()}


def _bare_fft(
    shapes: Shapes, ranks: int, ratio: float, *, steps: int, annealed: bool = False, **settings: Any
) -> Exchanges:
    """FFTCompression itself, at one theta for all tensors, which travel together.

    annealed : what is kept falls with the learning rate, and the bytes of all steps together come
        out at the ratio
    """
    budget = _payload_budget(shapes, ranks, ratio) * (ranks - 1)
    sizes = tuple(math.prod(shape) for shape in shapes.values())

    def schedule(keep: float) -> Schedule:
        return Annealed(1 - keep, _falling(steps), steps) if annealed else Constant(1 - keep)

    @cache
    def at(theta: float) -> float:
        codec = FFTCompression.using(theta=theta, **settings).settings.codec(threads=1)
        shares = shares_of(codec, sizes, ranks)
        if shares is not None:
            # Of an average rank: others' parts of what it owns, and the means that others own.
            return (ranks - 1) / ranks * sum((*shares.parts_bytes, *shares.means_bytes))
        return (ranks - 1) * sum(map(codec.payload_bytes, sizes))

    def received(keep: float) -> float:
        over_time, taken = schedule(keep), range(steps if annealed else 1)
        return sum(at(over_time.theta(step)) for step in taken) / len(taken)

    keep = _KEEPS[max(0, bisect(_KEEPS, budget, key=received) - 1)]
    chosen = FFTCompression.using(theta=schedule(keep), **settings).settings
    engines = [Engine(chosen, 1, stock="the study", tuner=None) for _ in range(ranks)]
    return {name: Frequencies(engines, name, shape) for name, shape in shapes.items()}


def _fft_in_time(
    shapes: Shapes, ranks: int, ratio: float, *, steps: int, way: str, feedback: bool = True
) -> Exchanges:
    """Frequencies by shape under a schedule whose bytes, over all steps, come out at the ratio.

    way : of _WAYS
    """
    budget = _payload_budget(shapes, ranks, ratio)

    @cache
    def nbytes(theta: float) -> int:
        return sum(_fft_of(s, theta).payload_bytes(math.prod(s)) for s in shapes.values())

    def mean(schedule: Schedule) -> float:
        return sum(nbytes(schedule.theta(step)) for step in range(steps)) / steps

    fits = bisect(_KEEPS, budget, key=lambda keep: mean(_WAYS[way](1 - keep, steps)))
    if not fits:
        raise SystemExit(f"{way}: no theta has a ratio of {ratio} or more")
    theta = 1 - _KEEPS[fits - 1]
    schedule, codec_of = _WAYS[way](theta, steps), cache(_fft_of)
    return {
        name: Gather(
            [_fft_of(shape, theta)] * ranks, feedback=feedback,
            at=lambda _, step, shape=shape: codec_of(shape, schedule.theta(step)),
        )
        for name, shape in shapes.items()
    }  # fmt: skip


def _falling(steps: int) -> Callable[[int], float]:
    """The study's learning rate behind its rise, as a fraction of its peak."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))


_WAYS: dict[str, Callable[[float, int], Schedule]] = {
    "constant": lambda theta, steps: Constant(theta),
    "warm-up": lambda theta, steps: Warmup(max(1, steps // 30), Constant(theta), dense=0.0),
    "diminishing": lambda theta, steps: Diminishing(theta, _falling(steps)),
}
"""Theta over the steps, from its largest value and the steps of the run."""


def _demo(shapes: Shapes, ranks: int, ratio: float) -> Exchanges:
    def make(shape: tuple[int, ...], topk: int) -> Codec:
        return codec("demo", preset="paper", shape=matrix(shape), topk=topk)

    budget = _payload_budget(shapes, ranks, ratio)
    return _gather(_fit(make, range(1, 1024), shapes, budget), shapes, ranks, headers=False)


def _auto(shapes: Shapes, ranks: int, ratio: float, **settings: Any) -> Exchanges:
    sessions = [AllReduceExchange(ratio=ratio, warmup=DENSE, **settings) for _ in range(ranks)]
    return {name: Shared(sessions, name, shape) for name, shape in shapes.items()}


def _auto_gather(shapes: Shapes, ranks: int, ratio: float, *, decay: float = 1.0) -> Exchanges:
    def make(shape: tuple[int, ...]) -> Codec:
        return codec("auto", ratio=ratio * ranks / 2, shape=shape)

    return _gather(make, shapes, ranks, decay=decay)


def _fixed(
    name: str, preset: str, shapes: Shapes, ranks: int, _: float | None, *, feedback: bool = True,
    seeds: bool = False, **settings: Any,
) -> Exchanges:  # fmt: skip
    def make(shape: tuple[int, ...], **seed: int) -> Codec:
        return codec(name, preset=preset, **settings, **seed)

    return _gather(make, shapes, ranks, seeds=seeds, feedback=feedback, headers=False)


def _dgc(shapes: Shapes, ranks: int, _: float | None, *, warmup: int = 1) -> Exchanges:
    """Its first four phases keep 25, 6.3, 1.6 and 0.4 %, and count."""

    def make(shape: tuple[int, ...]) -> Codec:
        return codec("dgc", preset="paper", warmup=warmup)

    return _gather(make, shapes, ranks, headers=False, at=DGCCodec.at)


def _powersgd(shapes: Shapes, ranks: int, _: float | None, *, rank: int) -> Exchanges:
    return {name: PowerSGD(matrix(shape), rank=rank) for name, shape in shapes.items()}


def _plain(shapes: Shapes, ranks: int, _: float | None, *, half: bool = False) -> Exchanges:
    return {name: Plain(half=half) for name in shapes}


Build = Callable[[Shapes, int, Any], Exchanges]
BUILD: dict[str, tuple[str, Build]] = {
    "plain": ("all-reduce", _plain),
    "fp16": ("all-reduce", partial(_plain, half=True)),
    "powersgd 1": ("all-reduce", partial(_powersgd, rank=1)),
    "powersgd 2": ("all-reduce", partial(_powersgd, rank=2)),
    "powersgd 4": ("all-reduce", partial(_powersgd, rank=4)),
    "auto": ("shared", _auto),
    "auto, memory x 0.9": ("shared", partial(_auto, decay=0.9)),
    "auto, no memory": ("shared", partial(_auto, feedback=False)),
    "auto frequencies": ("shared", partial(_auto, frequencies=True)),
    "auto gather": ("gather", _auto_gather),
    "fft": ("scatter", _bare_fft),
    "fft, 2 bits": ("scatter", partial(_bare_fft, values="2bit")),
    "fft, annealed": ("scatter", partial(_bare_fft, annealed=True)),
    "fft, 2 bits, annealed": ("scatter", partial(_bare_fft, values="2bit", annealed=True)),
    "fft gathered": ("gather", partial(_fft, by_shape=False)),
    "fft of blocks": ("gather", partial(_fft, by_shape=False, span=None)),
    "fft, 8 bits": ("gather", partial(_fft, by_shape=False, span=None, bits=8, mantissa=3)),
    "fft by shape": ("gather", _fft),
    "dct of spans": (
        "gather",
        partial(_fft, gathered=OfSpans, by_shape=False, transform="identity"),
    ),
    "fft by shape, warm-up": ("gather", partial(_fft_in_time, way="warm-up")),
    "fft by shape, no memory": (
        "gather",
        partial(_fft_in_time, way="constant", feedback=False),
    ),
    "fft by shape, no memory, diminishing": (
        "gather",
        partial(_fft_in_time, way="diminishing", feedback=False),
    ),
    "top-k": (
        "gather",
        partial(_topk, chunk=4096, indices="packed", values="fp16"),
    ),
    "sparseloco": (
        "gather",
        partial(_topk, chunk=4096, indices="packed", values="2bit", decay=0.95),
    ),
    "demo": ("gather", _demo),
    "dgc": ("gather", _dgc),
    "qsgd": ("gather", partial(_fixed, "qsgd", "paper", seeds=True)),
    "terngrad": ("gather", partial(_fixed, "terngrad", "paper", seeds=True)),
    "paper": ("gather", partial(_fixed, "fft", "paper", feedback=False, theta=0.9)),
}
"""name -> how its bytes meet, and what makes its exchanges from shapes, ranks and ratio."""


def build(method: str, shapes: Shapes, ranks: int, ratio: float | None, steps: int) -> Exchanges:
    """One exchange per tensor."""
    if method == "dgc":
        # A phase is a hundredth of the run, near the one in ninety of its authors.
        return _dgc(shapes, ranks, ratio, warmup=max(1, steps // 100))
    make = BUILD[method][1]
    if getattr(make, "func", make) in (_bare_fft, _fft_in_time):
        return make(shapes, ranks, ratio, steps=steps - DENSE)  # type: ignore[call-arg]
    return make(shapes, ranks, ratio)
