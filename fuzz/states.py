"""Forged and cut state dicts in every load_state_dict of sn_compress.

    python fuzz/states.py --full

A state is taken, or refused with a CompressError; what was refused has changed nothing, and no
memory was asked for that there is not. What was taken can be used and saved. Needs torch; the
seams of Horovod are attacked by what they hand over to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from runner import Target, main

from sn_compress import CompressError, ErrorFeedback, FFTCodec, LowRankCompression, codec
from sn_compress.allreduce.exchange import AllReduceExchange, Gradient
from sn_compress.gossip.differences import Differences
from sn_compress.gossip.ring import Ring
from sn_compress.torch.ddp import CompressionState
from sn_compress.torch.gossip import GossipOptimizer, ring_shuffle

SHAPE = (37, 21)
TENSORS = {"w": SHAPE, "v": (300,), "e": (64, 16)}
N = SHAPE[0] * SHAPE[1]
_PLAIN = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


@dataclass(frozen=True)
class Subject:
    """Something with a state: how it is made, saved, loaded and used."""

    make: Callable[[], Any]
    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]
    use: Callable[[Any], None]


class Alone:
    """The only rank there is; see sn_compress.torch.gossip.peers.Peers."""

    rank, ranks = 0, 1

    def prefix(self, kind: str) -> str:
        return kind

    def exchange(self, name: str, wire: Any, partner: Any) -> Callable[[], Any]:
        return lambda: wire

    def sum(self, name: str, tensor: Any) -> Callable[[], Any]:
        return lambda: tensor

    def broadcast(self, name: str, tensor: Any, root: int) -> None:
        pass


LOW_RANK = LowRankCompression.using(warmup=1, ratio=8, min_elements=100)


class Lonely(CompressionState):
    """Of a group of one, without a group."""

    ranks, rank = 1, 0  # type: ignore[assignment]


def _gradient(n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def _feedback(make_codec: Callable[[], Any]) -> Subject:
    def use(own: Any) -> None:
        for name in ("a", "b"):
            own.encode(name, _gradient())
        own.rescale(0.5)
        own.state_dict()

    def make() -> Any:
        own = ErrorFeedback(make_codec())
        own.encode("a", _gradient())
        own.encode("b", _gradient(seed=1))
        return own

    return Subject(make, lambda own: own.state_dict(), lambda own, s: own.load_state_dict(s), use)


def _run(rounds: Any) -> None:
    """Let a rank exchange with nobody: the sum is what it has."""
    sums = None
    try:
        while True:
            sums = [request.words for request in rounds.send(sums)]
    except StopIteration:
        pass


def _step(own: AllReduceExchange) -> None:
    for name, shape in TENSORS.items():
        values = _gradient(int(np.prod(shape)))
        if name == "e":
            values.reshape(shape)[5:] = 0
        if own.dense(name, shape):
            own.learn(name, own.dense_values(name, values))
        else:
            _run(own.rounds([Gradient(name, values.shape, values)], ranks=1, rank=0))


def _shared() -> AllReduceExchange:
    own = AllReduceExchange(ratio=8, warmup=1, every=3, min_elements=100)
    own.takes("small", (10,))
    for _ in range(2):
        _step(own)
    return own


def _ddp() -> CompressionState:
    named = [(name, torch.empty(shape)) for name, shape in TENSORS.items()]
    own = Lonely(LOW_RANK, named_parameters=named)
    own.process_group = "none"
    _step_all(own)
    return own


def _step_all(own: Any) -> None:
    for _ in range(2):
        _step(own.engine.shared)
    own.engine.feedback.encode("w", _gradient())


def _differences() -> Differences:
    own = Differences([(40, 30), (100,)], FFTCodec(theta=0.5, block=64))
    own.restart(_gradient(1300))
    own.pack(_gradient(1300, 1), 1)
    own.unpack(own.pack(_gradient(1300, 2), 2), 3)
    return own


def _gossip() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 20)
    optimizer = GossipOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), group=Alone(),
        topology="ring", codec=FFTCodec(theta=0.5, block=64),
    )  # fmt: skip
    optimizer.net = net
    _train(optimizer)
    return optimizer


def _train(optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.net(torch.ones(3, 64)).sum().backward()
    optimizer.step()


def _unused(own: Any) -> None:
    pass


def _ring() -> Ring:
    fields = [_gradient(12).reshape(6, 2), np.arange(6)]
    return Ring(fields, counts=[6, 6], rank=0, batch_size=2)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "fft": lambda: _feedback(lambda: FFTCodec(theta=0.9, block=64)),
    "whole": lambda: _feedback(lambda: FFTCodec(theta=0.9, block=None)),
    "axes": lambda: _feedback(lambda: codec("axes", shape=SHAPE, axes=(0,))),
    "topk": lambda: _feedback(lambda: codec("topk", theta=0.9)),
    "qsgd": lambda: _feedback(lambda: codec("qsgd")),
    "onebit": lambda: _feedback(lambda: codec("onebit")),
    "fp16": lambda: _feedback(lambda: codec("fp16")),
    "exchange": lambda: Subject(
        _shared, lambda own: own.state_dict(), lambda own, s: own.load_state_dict(s), _step
    ),
    "ddp": lambda: Subject(_ddp, _saved_by_ddp, lambda own, s: own.load_state_dict(s), _step_all),
    "ddp of two": lambda: Subject(
        _ddp,
        lambda own: [{**_saved_by_ddp(own), "rank": rank, "ranks": 2} for rank in range(2)],
        lambda own, s: own.load_state_dict(s),
        _step_all,
    ),
    "differences": lambda: Subject(
        _differences,
        lambda own: own.state_dict(),
        lambda own, s: own.load_state_dict(s),
        _unused,
    ),
    "gossip": lambda: Subject(
        # Not used afterwards: what torch's own optimizer loads it takes without a look.
        _gossip,
        lambda own: own.state_dict(),
        lambda own, s: own.load_state_dict(s),
        _unused,
    ),
    "ring": lambda: Subject(
        _ring,
        lambda own: own.state_dict(),
        lambda own, s: own.load_state_dict(s),
        _unused,
    ),
    "loader": lambda: Subject(
        lambda: ring_shuffle(torch.arange(6), torch.rand(6, 2), batch_size=2, group=Alone()),
        lambda own: own.state_dict(),
        lambda own, s: own.load_state_dict(s),
        _unused,
    ),
}


def _saved_by_ddp(own: CompressionState) -> Any:
    from sn_compress.codecs import registry

    state = {
        "format": 1, "ranks": 1, "rank": 0, "scale": own.engine.transaction.scale,
        "feedback": own.engine.feedback.state_dict(),
        "shared": own.engine.shared.state_dict(),
    }  # fmt: skip
    return registry.map_tree(np.ndarray, torch.from_numpy, state)


@cache
def _subject(name: str) -> Subject:
    return SUBJECTS[name]()


@cache
def _sound(name: str) -> Any:
    subject = _subject(name)
    return subject.save(subject.make())


def junk(rng: np.random.Generator) -> Any:
    """Something that is not what it should be."""
    things: list[Callable[[], Any]] = [
        lambda: None,
        lambda: True,
        lambda: int(rng.choice([-1, 0, 1, 2, 7, 776, 778, 2**31, 2**40, 2**62])),
        lambda: 10**30,
        lambda: float(rng.choice([0.5, -1.0, 1e308, np.nan, np.inf])),
        lambda: str(rng.choice(["", "x", "FFTCodec", "a", "1e9"])),
        lambda: b"bytes",
        list,
        dict,
        lambda: [1, [2, 3]],
        lambda: {"memory": {}},
        lambda: np.zeros(int(rng.integers(5)), np.float32),
        lambda: np.full(N, np.nan, np.float32),
        lambda: np.broadcast_to(np.float32(0), (int(rng.choice([N, 2**34, 2**40])),)),
        lambda: torch.zeros(1).expand(2**36),
        lambda: torch.zeros(3, dtype=torch.bfloat16),
        lambda: torch.zeros(3, requires_grad=True),
        lambda: torch.zeros(4, device="meta"),
        lambda: np.array([None, "x"], object),
        lambda: np.array(["x"]),
        lambda: np.array(1.5),
        lambda: np.zeros(N, np.complex64),
        lambda: np.full(2, 2**62),
        lambda: object(),
        lambda: _deep(int(rng.choice([20, 100, 2000]))),
    ]
    return things[rng.integers(len(things))]()


def _deep(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node]
    return node


def _copy(node: Any) -> Any:
    """New dicts and lists around the same arrays, which nothing here writes into."""
    if isinstance(node, dict):
        return {key: _copy(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)) and _flat(node):
        return type(node)(_copy(value) for value in node)
    return node


def _flat(node: Any) -> bool:
    """Whether it is none of _deep's."""
    return not (isinstance(node, list) and len(node) == 1 and isinstance(node[0], list))


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    places = [path]
    if isinstance(node, (dict, list, tuple)) and _flat(node):
        inside = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in inside:
            places += _places(value, (*path, key))
    return places


def _at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def damage(rng: np.random.Generator, state: Any) -> Any:
    """A copy of a state, changed in one to three places."""
    state = _copy(state)
    for _ in range(rng.integers(1, 4)):
        places = _places(state)
        path = places[rng.integers(len(places))]
        if not path:
            if rng.random() < 0.1:
                return junk(rng)
            continue
        *above, key = path
        parent = _at(state, tuple(above))
        if isinstance(parent, tuple):
            continue
        kind, old = rng.integers(7), parent[key]
        if kind <= 1:
            parent[key] = junk(rng)
        elif kind == 2:
            del parent[key]
        elif kind == 3:  # what is somewhere else
            parent[key] = _copy(_at(state, places[rng.integers(len(places))]))
        elif kind == 4 and isinstance(parent, dict):
            parent[junk_key(rng)] = parent.pop(key)
        elif kind == 5:
            parent[key] = _bent(rng, old)
        elif kind == 6 and isinstance(old, (int, float)):
            parent[key] = type(old)(rng.choice([-1, 0, 1, 2, 3, 64, 2**20, 2**40, 2**60]))
    return state


def junk_key(rng: np.random.Generator) -> Any:
    """A key that is not one."""
    keys = ["x", "", 0, -1, None, ("a", 1), 1.5, True, "state", 2**70]
    return keys[rng.integers(len(keys))]


def _bent(rng: np.random.Generator, old: Any) -> Any:
    """An array cut, turned, of another type, or with numbers that are none."""
    if isinstance(old, list):
        return old * 2 if rng.random() < 0.5 else old[: len(old) // 2]
    if not isinstance(old, np.ndarray) and not (torch.is_tensor(old) and old.dtype in _PLAIN):
        return old
    if isinstance(old, torch.Tensor):
        old = old.detach()
    if np.prod(old.shape) > 2**20 or str(getattr(old, "device", "cpu")) != "cpu":
        return old
    array = np.array(np.asarray(old))
    kind = rng.integers(6)
    if kind == 0:
        array = array[: array.shape[0] // 2] if array.ndim else array
    elif kind == 1:
        array = array[None]
    elif kind == 2:
        array = array.astype(
            [np.float64, np.int64, np.bool_, np.complex64, object][rng.integers(5)]
        )
    elif kind == 3 and array.size and array.dtype.kind == "f":
        array.reshape(-1)[rng.integers(array.size)] = rng.choice([np.nan, np.inf, 3e38])
    elif kind == 4 and array.size and array.dtype.kind in "iu":
        array.reshape(-1)[rng.integers(array.size)] = rng.choice([-1, 2**30, 300])
    elif kind == 5:
        array = array.reshape(-1)
    if isinstance(old, torch.Tensor) and array.dtype != object:
        return torch.from_numpy(np.ascontiguousarray(array))
    return array


def digest(node: Any) -> str:
    """What a state says, arrays by their bytes."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return [[repr(key), plain(value)] for key, value in node.items()]
        if isinstance(node, (list, tuple)):
            return [plain(item) for item in node]
        if isinstance(node, torch.Tensor):
            node = node.detach().numpy()
        if isinstance(node, np.ndarray):
            return [node.shape, str(node.dtype), hashlib.sha256(node.tobytes()).hexdigest()]
        return repr(node)

    return json.dumps(plain(node))


def case(seed: int) -> str:
    """One damaged state for one subject."""
    rng = np.random.default_rng(seed)
    names = list(SUBJECTS)
    name = names[seed % len(names)]
    subject = _subject(name)
    own = subject.make()
    before = digest(subject.save(own))
    state = damage(rng, _sound(name))
    try:
        with np.errstate(all="ignore"):
            subject.load(own, state)
    except CompressError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                raise AssertionError(f"{name} asked for memory that there is not") from error
            cause = cause.__cause__
        if digest(subject.save(own)) != before:
            raise AssertionError(f"{name} was refused, and half of it loaded: {error}") from error
        return "CompressError"
    try:
        with np.errstate(all="ignore"):
            subject.use(own)
            subject.save(own)
    except CompressError:
        return "taken, refused in use"
    return "taken"


# What torch imports at an optimizer's first step takes seconds, which are those of no case.
_gossip()

TARGETS = {"states": Target(case, full=10_000)}

if __name__ == "__main__":
    main(TARGETS)
