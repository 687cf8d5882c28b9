"""Engines without a framework, of ranks in one process, and collectives that join arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from rounds import drive

from sn_compress.arrays import asarray_like
from sn_compress.codecs import fft
from sn_compress.collective import Gradient
from sn_compress.engine import payloads
from sn_compress.engine.engine import Engine
from sn_compress.prediction.tuning import Tuner

RANKS = 2
SHAPES = {"wide": (40, 60), "kernel": (16, 8, 3, 3), "bias": (60,), "count": (3, 700)}


class Scaler:
    scale = 8.0

    def get_scale(self):
        return self.scale


class Decided:
    """What became of each tensor's last gradient, as the test says."""

    def __init__(self, outcome):
        self.outcome, self.of_last = outcome, []

    def sent(self, names):
        self.of_last = list(names)

    def of(self, name):
        return self.outcome


class Chosen:
    """A tuner that has settled, on what the test says."""

    settled = True

    def __init__(self, method):
        self.choice = method

    def method(self, name, shape):
        return self.choice


def engines(compression, ranks=RANKS, **options):
    return [
        Engine(compression.settings, 1, stock="DDP", tuner=Tuner, **options) for _ in range(ranks)
    ]


def nowhere_on_host(patch):
    """Let tensors of torch on the host stand for those of a device, which no compiled code sees."""
    for module in (payloads, fft):
        patch.setattr(module, "on_host", lambda values: isinstance(values, np.ndarray))


def noise(seed, ranks=RANKS, shapes=SHAPES):
    """For each rank, a gradient of every tensor; of low rank and noise."""
    found = []
    for rank in range(ranks):
        rng = np.random.default_rng([7, seed, rank])
        shared = np.random.default_rng([8, seed])
        values = {}
        for name, shape in shapes.items():
            rows, columns = shape[0], int(np.prod(shape[1:]))
            strong = shared.standard_normal((rows, 1)) @ shared.standard_normal((1, columns))
            small = rng.standard_normal((rows, columns)) / 4
            values[name] = (strong + small).astype(np.float32).reshape(-1)
        found.append(values)
    return found


def carried(each):
    """What each rank gets for one collective, given what all asked to carry in it."""
    (kind,) = {carry.kind for carry in each}
    words = [np.asarray(carry.words) for carry in each]
    if kind == "alltoall":
        cuts = [
            np.split(own, np.cumsum(carry.to_ranks(rank))[:-1])
            for rank, (carry, own) in enumerate(zip(each, words, strict=True))
        ]
        came = [np.concatenate([own[rank] for own in cuts]) for rank in range(len(each))]
        for rank, (carry, own) in enumerate(zip(each, came, strict=True)):
            assert own.size == sum(carry.of_ranks(rank))
        return came
    sizes = each[0].sizes or [words[0].size] * len(words)
    assert [own.size for own in words] == list(sizes)
    joined = np.concatenate(words) if kind == "gather" else sum(words[1:], words[0])
    return [joined.copy() for _ in words]


def raw(values):
    return values.view(torch.uint8).numpy() if torch.is_tensor(values) else values.view(np.uint8)


class Travelled(NamedTuple):
    """How a step's tensors travelled, by name, its collectives, and bytes that each rank got."""

    named: dict[str, list[str]]
    kinds: list[str]
    received: list[int]


def step(all_, values, shapes=SHAPES, total=None, make=lambda values: values, spoil=None):
    """One step: the values become the means.

    spoil : the number of a collective, and the byte (by default in the middle) that is damaged
    """
    ranks, kinds, received = len(all_), [], [0] * len(all_)
    total = total or (lambda name, words: words * ranks)  # the sum, where all bring the same
    ways = []
    for engine, own in zip(all_, values, strict=True):
        given = [Gradient(name, shape, make(own[name])) for name, shape in shapes.items()]
        engine.begin(given)
        ways.append(engine.sort(given, ranks=ranks, total=total))
    named = [
        {kind: [g.name for g in getattr(way, kind)] for kind in ("plain", "dense", "coded")}
        for way in ways
    ]
    assert all(each == named[0] for each in named)
    for place in range(len(ways[0].dense)):
        sent = [e.dense_values(way.dense[place]) for e, way in zip(all_, ways, strict=True)]
        for way, engine in zip(ways, all_, strict=True):
            gradient = way.dense[place]
            gradient.values[:] = asarray_like(np.mean(sent, axis=0), gradient.values)
            engine.learn(gradient.name, gradient.values)
    for place in range(len(ways[0].plain)):
        plain = [np.asarray(way.plain[place].values) for way in ways]
        mean = np.mean(plain, axis=0)
        for own in plain:
            own[:] = mean
    pairs = enumerate(zip(all_, ways, strict=True))
    rounds = [e.rounds(w.coded, ranks=ranks, rank=r) for r, (e, w) in pairs if w.coded]

    def combine(_, asked):
        results = [[] for _ in asked]
        for each in zip(*asked, strict=True):
            kinds.append(each[0].kind)
            came = carried(each)
            for rank, (carry, own) in enumerate(zip(each, came, strict=True)):
                received[rank] += own.nbytes - (kinds[-1] == "gather") * carry.words.nbytes
                if spoil is not None and spoil[0] == len(kinds):
                    own[spoil[1] or own.size // 2] ^= 4
                results[rank].append(torch.from_numpy(own) if torch.is_tensor(carry.words) else own)
        return results

    with all_[0].seconds.coding():
        drive(rounds, combine)
    for name in shapes:
        assert all(np.array_equal(raw(own[name]), raw(values[0][name])) for own in values), name
    return Travelled(named[0], kinds, received)


@dataclass(frozen=True)
class Way:
    """A compression, and of what its gradients are."""

    name: str
    compression: Any
    ranks: int = RANKS
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    on_device: bool = False

    def engines(self, **options):
        return engines(self.compression, self.ranks, **options)

    def noise(self, seed):
        return noise(seed, self.ranks, self.shapes)

    def step(self, all_, values):
        # A tensor of torch has the array's memory: what is written to the one is in the other.
        make = torch.from_numpy if self.on_device else lambda own: own
        return step(all_, values, self.shapes, make=make)
