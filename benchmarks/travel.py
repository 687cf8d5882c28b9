"""Exchanges through real Horovod ranks: recorded alone, and replayed.

A machine with fewer cores than ranks cannot time a codec honestly while all ranks run it: each
would see a share of a core. So an exchange can be *recorded*, by one rank with the machine's core
for itself, in seconds of CPU; and *played* by all ranks: the same collectives of the same bytes,
and in the place of the codec a sleep of the recorded seconds. Real exchanges run the same way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from wire_methods import Exchange, Method, Request

Shapes = Sequence[tuple[str, tuple[int, ...]]]
_NAP_S = 5e-4  # between looks at what Horovod has finished


@dataclass
class Script:
    """A recorded exchange of one tensor.

    Attributes
    ----------
    rounds : (collective, elements, dtype) of each
    codec_s : CPU seconds before, between and after them
    """

    name: str
    rounds: list[tuple[str, int, str]]
    codec_s: list[float]

    @property
    def sent(self) -> list[tuple[str, int]]:
        """Collective and bytes of each round."""
        return [(kind, count * np.dtype(dtype).itemsize) for kind, count, dtype in self.rounds]


def record(method: Method, gradients: dict[str, np.ndarray], ranks: int, warm: int) -> list[Script]:
    """Each tensor's script, as if all ranks had these gradients; `warm` steps come first."""
    for _ in range(warm):
        for name, values in gradients.items():
            _record_one(method, name, values, ranks)
    return [_record_one(method, name, values, ranks) for name, values in gradients.items()]


def _record_one(method: Method, name: str, values: np.ndarray, ranks: int) -> Script:
    script = Script(name, [], [])
    # Gradients are written into by all-reduces.
    exchange = method(name, values.shape, values.reshape(-1).copy())
    answer: np.ndarray | None = None
    while True:
        start = time.process_time()
        try:
            request = exchange.send(answer)  # type: ignore[arg-type]
        except StopIteration:
            script.codec_s.append(time.process_time() - start)
            return script
        script.codec_s.append(time.process_time() - start)
        array = request.array
        script.rounds.append((request.kind, array.size, array.dtype.str))
        if request.alike is not None:
            answer = request.alike()
        elif request.kind == "allgather":
            answer = np.tile(array, ranks)
        else:
            answer = array * array.dtype.type(ranks)


def play(script: Script, *, free: bool) -> Exchange:
    """The script as an exchange; with `free` its codec takes no time."""
    for codec_s, (kind, count, dtype) in zip(script.codec_s, script.rounds, strict=False):
        if not free:
            time.sleep(codec_s)
        yield Request(kind, np.zeros(count, dtype))
    if not free:
        time.sleep(script.codec_s[-1])
    return np.zeros(0, np.float32)


@dataclass
class _Trip:
    name: str
    exchange: Exchange
    answer: np.ndarray | None = None
    round: int = 0
    handle: Any = None
    array: np.ndarray | None = None


@dataclass
class Travel:
    """All exchanges of a step on one rank.

    overlap : the codec runs in a thread of its own, beside whatever the caller computes; otherwise
        in `begin` and `wait`

    Attributes
    ----------
    sent : (collective, bytes) of everything this rank put in
    """

    hvd: Any
    overlap: bool = False
    sent: list[tuple[str, int]] = field(default_factory=list)
    _ready: deque[_Trip] = field(default_factory=deque)
    _away: list[_Trip] = field(default_factory=list)
    _means: dict[str, np.ndarray] = field(default_factory=dict)
    _open: int = 0
    _closing: bool = False
    _failure: BaseException | None = None
    _thread: threading.Thread | None = None

    def begin(self, name: str, exchange: Exchange) -> None:
        """Send a tensor off."""
        self._open += 1
        self._ready.append(_Trip(name, exchange))
        if not self.overlap:
            self._advance()
        elif self._thread is None:
            self._closing = False
            self._thread = threading.Thread(target=self._work)
            self._thread.start()

    def wait(self) -> dict[str, np.ndarray]:
        """The means of all tensors sent off, by name."""
        if self._thread is not None:
            self._closing = True
            self._thread.join()
            self._thread = None
            if self._failure:
                raise self._failure
        while self._open:
            if not self._advance():
                time.sleep(_NAP_S)
        means, self._means = self._means, {}
        return means

    def _work(self) -> None:
        try:
            while not (self._closing and not self._open):
                if not self._advance():
                    time.sleep(_NAP_S)
        except BaseException as error:  # noqa: BLE001  (raised again by wait)
            self._failure = error

    def _advance(self) -> bool:
        """Do what can be done; whether that was anything."""
        done = [trip for trip in self._away if self.hvd.poll(trip.handle)]
        for trip in done:
            self._away.remove(trip)
            answer = self.hvd.synchronize(trip.handle)
            # An all-to-all also says how much came of each rank.
            trip.answer = (answer[0] if isinstance(answer, tuple) else answer).numpy()
            self._ready.append(trip)
        if not self._ready:
            return bool(done)
        trip = self._ready.popleft()
        try:
            request = trip.exchange.send(trip.answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self._means[trip.name] = end.value
            self._open -= 1
        else:
            self._send(trip, request)
        return True

    def _send(self, trip: _Trip, request: Request) -> None:
        import torch

        key = f"bench{trip.round}.{trip.name}"
        trip.round += 1
        wire = torch.from_numpy(request.array)
        self.sent.append((request.kind, request.array.nbytes))
        if request.kind == "allgather":
            trip.handle = self.hvd.allgather_async(wire, name=key)
        elif request.kind == "alltoall":
            splits = request.sizes or self._evenly(wire.numel())
            trip.handle = self.hvd.alltoall_async(wire, torch.tensor(splits), name=key)
        else:
            trip.handle = self.hvd.allreduce_async_(wire, name=key, op=self.hvd.Sum)
        self._away.append(trip)

    def _evenly(self, elements: int) -> list[int]:
        """How a played all-to-all is divided among the others, whoever owns what."""
        others = self.hvd.size() - 1
        splits = [elements * (at + 1) // others - elements * at // others for at in range(others)]
        splits.insert(self.hvd.rank(), 0)
        return splits
