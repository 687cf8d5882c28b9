"""What a traced function calls at each step, in numbers: the half of a rim that is not a graph.

TensorFlow runs these from threads of its own, several buckets at a time, each bucket's in order. A
gradient is known by a name, or by the slot of its variable.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import CompressError, PayloadError
from ..base.sameness import Sameness
from ..base.saved import arrays_of, reading
from ..codecs.base import Bytes, Floats
from ..codecs.frequency.fft import FFTCodec
from ..codecs.gather import mean_of_gathered
from ..engine.feedback import ErrorFeedback
from ..engine.owed import Owed
from ..engine.theta import ThetaInTime, squares
from ..report import Told, Traffic
from ..settings import Settings
from ..sums.bucket import HEAD
from ..sums.session import SharedExchange

Words = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)
_HANDLE = re.compile(r'ResourceHandle\(name="([^"]+)"')
NO_VARIABLE = -1
_ARRAY = "array of the file"


@dataclass
class Begun:
    """A bucket's step of the shared exchange on its way; `sent` counts bytes."""

    rounds: Generator[Any, Any, list[Any]]
    sent: int


class Traced:
    """What belongs to one compression: codec, error memories, counts.

    settings : the user's
    threads : of the codec, where the settings leave it open
    """

    def __init__(self, settings: Settings, threads: int) -> None:
        settings.refuse_overlap("TensorFlow and Keras")
        self.settings = settings
        self.codec = settings.codec(threads)  # that of the first step
        self._threads = threads
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all variables and what was dropped of them: for models that are gone."""
        with self._lock:
            self.feedback = ErrorFeedback(self.codec, decay=self.settings.decay)
            self.shared = SharedExchange(**self.settings.shared)
            self.owed = Owed()  # of tensors that the tuner lets travel plain
            self.theta = ThetaInTime(self.settings, self._threads)
            self._lost: dict[str | None, tuple[float, float]] = {}  # energy, error; since asked
            self._codecs: dict[str | None, FFTCodec] = {}  # of the step under way, by key
            self._rounds: dict[tuple[str, ...], Begun] = {}
            self._slot_of: dict[str, int] = {}
            self._keys: list[str] = []
            # Of variables; see nodes/outcomes.py.
            self.marks: dict[str, tuple[int | None, bool]] = {}
            self.asked: set[str] = set()  # what ranks have agreed on
            self._sameness: dict[Any, Sameness] = {}

    def restart(self, residuals: Mapping[str, Floats]) -> None:
        """Begin anew, counts as well, with what was not sent of these; shapes may be others."""
        self.clear()
        speaks, self.traffic = self.traffic.speaks, Traffic()
        self.traffic.speaks = speaks
        self.exchange().restart(residuals)

    def sameness_of(self, what: Any) -> Sameness:
        """When the parameters of one tape or optimizer are compared, which `what` stands for."""
        with self._lock:
            return self._sameness.setdefault(what, Sameness(self.settings.check_every))

    def begin_anew(self) -> None:
        """When ranks have come or gone, on all of them: count steps from here."""
        with self._lock:
            for sameness in self._sameness.values():
                sameness.begin_anew()

    def follow(self, state: Mapping[str, Any]) -> None:
        """Be where another rank's state is in the schedule."""
        self.theta.load_state_dict(state.get("theta", {}))
        with self._lock:
            self._lost, self.marks = {}, {}
            self.feedback.commit()

    def count_beside(self, nbytes: int) -> None:
        """Count what is no gradient; see Traffic."""
        with self._lock:
            self.traffic.beside(nbytes)

    def count_plain(self, name: str, elements: int, nbytes: int) -> None:
        """Count a tensor whose size only the step knows."""
        with self._lock:
            self.traffic.plain(name, elements, nbytes)

    def count_sparse(self, name: str, elements: int, nbytes: int) -> None:
        """Count a sparse gradient."""
        with self._lock:
            self.traffic.sparse(name, elements, nbytes)

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a gradient is compressed; one that shrank goes on to be, small as it may be."""
        known = name in self.shared.tensors or self.feedback.remembers(name)
        return known or self.shared.takes(name, shape)

    def slots(self, handles: Iterable[str]) -> list[int]:
        """One number per variable, in the order in which they first come.

        handles : the texts of the variables' handles. In each is a name such as "kernel/12", whose
            second part is TensorFlow's count of all variables of the process.
        """
        found = []
        with self._lock:
            for handle in handles:
                match = _HANDLE.search(handle)
                if match is None:
                    raise CompressError(
                        f"the handle {handle} of a variable shows no name; expected one as "
                        "TensorFlow 2.21 writes it. Please report your version of TensorFlow."
                    )
                if match[1] not in self._slot_of:
                    self._slot_of[match[1]] = len(self._keys)
                    self._keys.append(f"{len(self._keys)}:{match[1].rpartition('/')[0]}")
                found.append(self._slot_of[match[1]])
        return found

    def exchanges(self, handle: str) -> bool:
        """Whether gradients of a variable of this handle were exchanged."""
        match = _HANDLE.search(handle)
        return match is not None and match[1] in self._slot_of

    def key(self, name: str | None, slot: int) -> str | None:
        """What the memory of a gradient is kept under: "0:kernel" for the first variable."""
        return name if slot == NO_VARIABLE else self._keys[slot]

    @property
    def learns(self) -> bool:
        """Whether theta follows what steps have lost: then `begin_step` says what it is."""
        return self.settings.exchange == "gather" and self.theta.learns

    def settle(self, names: Sequence[str], digests: Sequence[int]) -> None:
        """Before gradients of variables are exchanged: what became of their last ones.

        See nodes/outcomes.py for the rule. What was left out of gradients that were applied is
        kept; what was, of those that were dropped, is taken back.

        digests : of the variables
        """
        if not names:
            return
        with self._lock:
            self.feedback.undoable = True
            applied: list[str] = []
            dropped: list[str] = []
            for name, digest in zip(names, digests, strict=True):
                before, changes = self.marks.get(name, (None, False))
                (dropped if changes and before == digest else applied).append(name)
                seen = before is not None and before != digest
                self.marks[name] = digest, changes or seen
            for part in (self.feedback, self.shared, self.owed):
                part.abort(dropped)
                part.commit(applied)
        if dropped:
            self.say_dropped()

    def say_dropped(self) -> None:
        """Called when a gradient was dropped."""

    def lost(self) -> npt.NDArray[np.float64]:
        """Energy and error of what this rank has encoded since it was asked before, [2]."""
        with self._lock:
            told, self._lost = self._lost, {}
        # Exact, as threads encode in any order.
        return np.array([math.fsum(each) for each in zip(*told.values(), strict=True)] or [0.0, 0])

    def begin_step(self, of: str, total: npt.NDArray[np.float64]) -> float:
        """Theta for all gradients of a step, from the sum of the ranks' `lost`."""
        with self._lock:
            return self.theta.begin_step(of, *total.tolist())

    def encode(
        self, keys: Sequence[str | None], values: Sequence[Floats], theta: float | None = None
    ) -> Bytes:
        """The payloads of a bucket's gradients one behind the other, [bytes] uint8.

        theta : of the step, where `learns`; else None, and steps are counted by key
        """
        pieces = zip(keys, values, strict=True)
        return np.concatenate([self._encode(key, each.reshape(-1), theta) for key, each in pieces])

    def _encode(self, key: str | None, values: Floats, theta: float | None) -> Bytes:
        with self._lock:
            codec = self.theta.codec_for(key) if theta is None else self.theta.codec_at(theta)
            self._codecs[key] = codec
        if key is None or not self.settings.feedback:
            payload = codec.encode(values)
        else:
            payload = self.feedback.encode(key, values, codec=codec)
        told = Told.of([payload])
        with self._lock:
            if theta is not None:
                lost, before = self.theta.tell(told), self._lost.get(key, (0.0, 0.0))
                self._lost[key] = before[0] + lost[0], before[1] + lost[1]
            saturated = self.traffic.payload(key, values.size, told)
        if saturated:
            say_saturated(str(key))
        return payload.buffer

    def mean(
        self,
        keys: Sequence[str | None],
        gathered: Bytes,
        *,
        ranks: int,
        sizes: Sequence[int],
        factor: float,
    ) -> list[Floats]:
        """The means of a bucket's gathered payloads times a factor, [n] float32 each."""
        codecs = [self._codecs[key] for key in keys]
        wires = [codec.payload_bytes(n) for codec, n in zip(codecs, sizes, strict=True)]
        if gathered.size != ranks * sum(wires):
            raise PayloadError(
                f"gathered {gathered.size} bytes from {ranks} ranks; expected {sum(wires)} "
                "from each. Do all ranks run the same version with the same settings?"
            )
        rows = gathered.reshape(ranks, -1)
        cuts = np.split(rows, np.cumsum(wires)[:-1], axis=1)
        means = [
            mean_of_gathered(codec, np.ascontiguousarray(cut).reshape(-1), ranks, n)
            for codec, cut, n in zip(codecs, cuts, sizes, strict=True)
        ]
        return [_times(mean, factor) for mean in means]

    def begin(
        self,
        keys: Sequence[str],
        values: Sequence[Floats],
        *,
        shapes: Sequence[Sequence[int]],
        ranks: int,
        rank: int,
    ) -> tuple[bool, Floats, Words]:
        """A bucket's step of the shared exchange: if it is dense, what to average, else to sum.

        The vector is empty if it is not dense, [all elements] float32 else; the words the other way
        round. A step is dense for the whole bucket if it is for one tensor of it.
        """
        flat = [each.reshape(-1) for each in values]
        with self._lock:  # the first bucket of a step chooses for all
            asked = [self.shared.dense(*each) for each in zip(keys, shapes, strict=True)]
            if any(asked):
                for key, each in zip(keys, flat, strict=True):
                    self.traffic.dense(key, each.size, 4 * each.size)
                pieces = zip(keys, flat, strict=True)
                whole = np.concatenate([self.shared.whole(key, each) for key, each in pieces])
                return True, whole, np.zeros(0, np.int32)
            rounds = self.shared.exchange_all(keys, flat, ranks=ranks, rank=rank)
        words = next(rounds)
        self._rounds[tuple(keys)] = Begun(rounds, words.nbytes)
        return False, np.zeros(0, np.float32), words

    def learn(
        self, keys: Sequence[str], mean: Floats, *, sizes: Sequence[int], factor: float
    ) -> Floats:
        """The end of a dense step; returns the bucket's mean times the factor."""
        with self._lock:
            for key, each in zip(keys, np.split(mean, np.cumsum(sizes)[:-1]), strict=True):
                self.shared.learn(key, each)
        return _times(mean, factor)

    def advance(
        self, keys: Sequence[str], total: Words, *, ranks: int, factor: float
    ) -> tuple[bool, Words, Floats]:
        """After one round: whether there is another, its words, or the means times the factor.

        The means are one behind the other, [all elements] float32.
        """
        begun = self._rounds[tuple(keys)]
        try:
            words = begun.rounds.send(total)
        except StopIteration as end:
            with self._lock:
                self._count_sums(keys, end.value, begun.sent, ranks)
                self._rounds.pop(tuple(keys), None)
            self.stepped(keys)
            return False, np.zeros(0, np.int32), _times(np.concatenate(end.value), factor)
        begun.sent += words.nbytes
        return True, words, np.zeros(0, np.float32)

    def stepped(self, keys: Sequence[str]) -> None:
        """Called when a bucket's step of sums has ended."""

    def _count_sums(
        self, keys: Sequence[str], means: Sequence[Floats], sent: int, ranks: int
    ) -> None:
        """Count a bucket; the first of its tensors has what none has alone, the heads."""
        own = [4 * sum(each - HEAD for each in self.shared.words(key, ranks)) for key in keys]
        own[0] = sent - sum(own[1:])
        for key, mean, nbytes in zip(keys, means, own, strict=True):
            energy, error = self.shared.lost(key)
            way = self.shared.way(key)
            self.traffic.shared(key, mean.size, nbytes, energy, error, way=way)

    def report(self) -> dict[str, float]:
        """See Compression.report."""
        with self._lock:
            return self.traffic.report()

    def state_dict(self) -> dict[str, Any]:
        """The error memory by variable ("0:kernel"), as arrays; it differs between ranks."""
        state = self.exchange().state_dict()
        if owed := self.owed.state_dict():
            state["owed"] = owed
        if self.settings.fixed:
            return state
        lost = {str(key): list(each) for key, each in self._lost.items()}
        return state | {"theta": self.theta.state_dict(), "lost": lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned on the same rank, with the same exchange."""
        with self.theta.loading(state):
            with reading("the saved state"):
                saved = state.get("lost", {}).items()
                lost: dict[str | None, tuple[float, float]] = {k: squares(v) for k, v in saved}
            owed = Owed.mean([state.get("owed", {})])
            self.exchange().load_state_dict(state)
        self.marks = {}
        self.feedback.commit()
        self._lost, self.owed = lost, owed

    def exchange(self) -> ErrorFeedback | SharedExchange:
        """Who keeps the memories."""
        return self.shared if self.settings.exchange == "shared" else self.feedback

    def remembers(self, name: str) -> bool:
        """Whether anything of a tensor has yet to be sent."""
        return self.exchange().remembers(name) or name in self.owed

    def residual(self, name: str) -> Floats:
        """What this rank has yet to send of a tensor, [n] float32."""
        own = self.exchange()
        if name not in self.owed:
            return own.residual(name)
        left = self.owed.left(name)
        return left + own.residual(name) if own.remembers(name) else left.copy()

    def to_bytes(self, rank: int) -> bytes:
        """The state of this rank as a file of arrays."""
        arrays: list[npt.NDArray[Any]] = []

        def put(array: npt.NDArray[Any]) -> dict[str, int]:
            arrays.append(array)
            return {_ARRAY: len(arrays) - 1}

        tree = _each(self.state_dict(), lambda node: isinstance(node, np.ndarray), put)
        head = json.dumps({"rank": rank, "exchange": self.settings.exchange, "state": tree})
        stream = io.BytesIO()
        np.savez(
            stream,
            head=np.frombuffer(head.encode(), np.uint8),
            **{str(i): array for i, array in enumerate(arrays)},  # type: ignore[arg-type]
        )
        return stream.getvalue()

    def from_bytes(self, data: bytes, rank: int) -> None:
        """Take over what to_bytes returned on the same rank; CompressError for another's."""
        with reading("this error memory"):
            arrays = arrays_of(data)
            head = json.loads(arrays["head"].tobytes())
            if (head["rank"], head["exchange"]) != (rank, self.settings.exchange):
                raise CompressError(
                    f"this error memory is of rank {head['rank']} and the {head['exchange']} "
                    f"exchange; expected rank {rank} and the {self.settings.exchange} one, which "
                    f"is that of {self.settings.compression}. Save one checkpoint per rank, with "
                    "the rank in its name, and go on with the same compression."
                )
            state = _each(
                head["state"],
                lambda node: isinstance(node, dict) and set(node) == {_ARRAY},
                lambda node: arrays[str(node[_ARRAY])],
            )
        self.load_state_dict(state)


def say_saturated(what: str) -> None:
    """Called once, when values are clipped first."""
    _log.warning(
        "%s: values beyond the fixed window were clipped; see `saturated` in the report", what
    )


def _times(mean: npt.NDArray[np.floating[Any]], factor: float) -> Floats:
    """Float32, as the graph expects it."""
    single = mean.astype(np.float32, copy=False)
    return single if factor == 1.0 else single * np.float32(factor)


def _each(node: Any, chosen: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Dicts and lists with every chosen node changed."""
    if chosen(node):
        return change(node)
    if isinstance(node, dict):
        return {key: _each(value, chosen, change) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_each(item, chosen, change) for item in node]
    return node
