"""Hierarchical exchange over compute nodes for Horovod's TensorFlow: on the host, and in a graph.

Every collective is an all-to-all of all ranks (docs/decisions/0098). A step of the engine runs the
rounds of `engine/all_to_all.py`, as many as owners need. In a graph their number must be known in
advance: it follows from sizes and settings, and a rank that owns less takes part with nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..arrays import to_host
from ..collective import Gradient
from ..consistency import Total
from ..engine import all_to_all
from ..engine.engine import Engine
from ..engine.engine_state import NodeStates
from ..engine.hierarchy import Place, horovods_layout, may_have_nodes
from ..engine.payloads import shares_of
from ..settings import Settings
from .agreement import elastic, refuse_joined
from .graph import Collectives, GraphStep, arrived, one_of
from .host_step import cut
from .tracing import Call

JOINED = (
    "another rank called hvd.join(), and by nodes each rank has gradients to sum, which Horovod "
    "cannot do without it; none was sent. Give all ranks the same number of batches "
    "(drop_remainder=True), or use LowRankCompression or AutoCompression with hierarchy=None, "
    "which allow hvd.join()."
)
_ROUNDS = 2  # maximum number of rounds of a sum; see allreduce/methods


class Nodes(NodeStates):
    """Hierarchy of a compression: this rank's place, once known, and states to resume from.

    Attributes
    ----------
    restarted : residuals with which this rank has restarted, until nodes are known
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(engine)
        self.restarted: dict[str, Any] | None = None
        self._settings = settings
        self._ranks = self._rank = 0
        self._known = elastic()  # elastic runs do not use nodes
        self._brought: dict[str, Any] | None = None  # residuals to add to the next gradients
        self._steady: dict[tuple[str, ...], int] = {}  # by call, equal on all ranks

    def find(self, process_set: Any, total: Total) -> None:
        """Find out which nodes there are; blocks, and all ranks call it."""
        if self._known or process_set.process_set_id:
            return
        if may_have_nodes(self._settings, process_set):
            layout = horovods_layout(total, process_set)
            if layout is not None:
                self.place = Place(layout, process_set.rank())
        self._known, self._ranks, self._rank = True, process_set.size(), process_set.rank()
        if self.place is not None and self.restarted is not None:
            # They are sent with the next gradients, whose owners are not the ranks that have them.
            self._engine.exchange.restart({})
            self._brought = self.restarted
        self.restarted = None
        self._settle()

    def changed(self) -> None:
        """Continue from the state the engine has loaded; CompressError if that is impossible."""
        self._steady.clear()
        if self._known:
            self._settle()

    def _settle(self) -> None:
        exchange = self._engine.exchange
        part = "shared" if self._settings.exchange == "shared" else "feedback"
        sizes: dict[str, int] = {}
        for state in self.loaded or []:
            sizes |= exchange.sizes(state[part])
        if self.loaded is None:
            sizes = exchange.sizes(exchange.state_dict())
        self.settle(sorted(sizes.items()), ranks=self._ranks, rank=self._rank)

    @property
    def size(self) -> int:
        """Number of ranks in a node, whose mean the residuals here belong to."""
        saved = self.saved(self._ranks)
        return len(saved["nodes"][0]) if saved else 1

    def owns(self, name: str, elements: int) -> bool:
        """Whether this rank owns a tensor; without nodes every rank owns all."""
        place = self.place
        return place is None or place.owners.of(name, elements) == place.number

    def serve(self, call: Call) -> bool:
        """Whether a call is hierarchical: those of tapes and optimizers, over all ranks."""
        everyone = not call.process_set.process_set_id
        return self.place is not None and call.sources is not None and everyone

    def all_are_here(self, call: Call, vectors: Sequence[Any]) -> Any:
        """Return a graph node, [] int64 zero, for a step to wait for; fails if a rank has joined.

        None if a call is not hierarchical, and eagerly, where `average` checks before it sends
        anything. In a graph Horovod's own all-reduces run in parallel: an error in the exchange
        would keep some ranks from starting one that others wait for, or apply it on some only.
        """
        if tf.executing_eagerly() or not vectors or not self.serve(call):
            return None
        present = hvd.allreduce(
            one_of(vectors[0]), op=hvd.Sum, process_set=call.process_set,
            name=tf.compat.v1.get_default_graph().unique_name("sn_ranks"),
        )  # fmt: skip
        all_are = tf.reduce_all(tf.equal(present, call.process_set.size()))
        with tf.control_dependencies([tf.debugging.Assert(all_are, [f"CompressError: {JOINED}"])]):
            return tf.cast(present[0], tf.int64) * 0

    def sum(self, call: Call, sizes: Mapping[Any, int]) -> NodeSum | None:
        """Return the NodeSum of a call's tensors, for a graph; None if it is not hierarchical."""
        if self.place is None or None in sizes or not sizes or not self.serve(call):
            return None
        return NodeSum(self.place, sizes)

    def average(
        self,
        gradients: Sequence[Gradient],
        call: Call,
        mark: str,
        count: Callable[[int], None],
    ) -> None:
        """Average gradients in place, on the host; all ranks call it with the same ones.

        mark : prefix of the names of collectives
        count : called with the bytes that this rank sends besides gradients
        """
        sets = call.process_set
        # Before anything is sent: Horovod cannot run an all-to-all if a rank has joined.
        refuse_joined(sets, count, f"{mark}.ranks", JOINED)
        self._engine.begin(gradients)
        for gradient in gradients:
            if self._brought and gradient.name in self._brought:
                gradient.values[:] += self._brought.pop(gradient.name).reshape(-1)
        assert self.place is not None
        rounds = all_to_all.rounds(
            self._engine, self.place, gradients, lambda names: None, taken=True
        )
        received: Any = None
        with suppress(StopIteration):
            for turn in itertools.count():
                (carry,) = rounds.send(received)
                with tf.device("CPU"):
                    words, splits = hvd.alltoall(
                        tf.constant(to_host(carry.words)), name=f"{mark}.{turn}",
                        splits=tf.constant(carry.splits, tf.int32), process_set=sets,
                    )  # fmt: skip
                received = [np.split(words.numpy(), np.cumsum(splits.numpy())[:-1])]

    def agree(
        self,
        names: Sequence[str],
        steps_of: Callable[[Sequence[str]], int],
        process_set: Any,
        count: Callable[[int], None],
    ) -> int:
        """Return for how many steps after a host step a call's sizes stay the same on all owners.

        steps_of : returns that number for some tensors
        """
        assert self.place is not None
        owned = [name for name in names if self.place.owners.of_name[name] == self.place.number]
        steps = steps_of(owned)
        # Sizes change at different steps on different owners; all ranks use a graph, or none.
        if self._settings.exchange == "shared":
            count(8)
            word = tf.constant([steps], tf.int64)
            least = hvd.allreduce(word, op=hvd.Min, name="sn.steady", process_set=process_set)
            steps = int(least.numpy()[0])
        self._steady[tuple(names)] = steps
        return steps

    def steps_left(self, key: tuple[str, ...], steps: int) -> int:
        """Return for how many steps a call can be a graph; for payloads `steps`, equal on ranks."""
        agreed = self._steady.get(key, 0)
        on_host_first = self._brought is not None and key not in self._steady
        return agreed if self._settings.exchange == "shared" or on_host_first else steps

    def ended(self, key: tuple[str, ...], graph: GraphStep) -> None:
        """Note that a call's graph has ended: only its remaining steps have known sizes."""
        if key in self._steady:
            self._steady[key] = graph.steps_left

    def count(self, nbytes: int) -> None:
        """Count bytes that graphs have sent inside the node."""
        if self.place is not None:
            self.place.sent_bytes += nbytes

    def report(self) -> dict[str, float]:
        """Return the entries for a report; empty without nodes."""
        steps = self._engine.traffic.steps
        return {} if self.place is None else self.place.report(steps)


class NodeSum:
    """Sends a call's gradients to their owners in the node and the means back, in the graph.

    sizes : elements by name, of all tensors of the call, equal on all ranks

    Attributes
    ----------
    mine : indices of the tensors that this rank owns
    inside_bytes : bytes that this rank sends to others of its node per step
    """

    def __init__(self, place: Place, sizes: Mapping[str, int]) -> None:
        self.place, self.sizes, self._sizes = place, sizes, list(sizes.values())
        number_of = [place.owners.of(name, n) for name, n in sizes.items()]
        self._owned = [
            [at for at, owner in enumerate(number_of) if owner == number]
            for number in range(place.layout.size)
        ]
        self.mine = self._owned[place.number]
        self._words = [sum(self._sizes[at] for at in owned) for owned in self._owned]
        mine = self._words[place.number]
        self.inside_bytes = 4 * (sum(self._words) - mine + (place.layout.size - 1) * (1 + mine))

    def average(
        self,
        call: Call,
        settings: Settings,
        codec: Any,
        vectors: Sequence[Any],
        step: Callable[[Collectives, Mapping[int, Any]], Mapping[int, Any]],
    ) -> list[Any]:
        """Return the means of all tensors.

        codec : for payloads, in the steps of the graph
        step : the exchange between nodes; maps gradients, by index, to means
        """
        mark = tf.compat.v1.get_default_graph().unique_name("sn_nodes")
        kinds = self._kinds(settings, codec)

        # A separate function: TensorFlow numbers the conditions of a graph, and names the ops in
        # Horovod's own by that, so all ranks need the same number, whatever they own.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def average(vectors: Sequence[Any]) -> list[Any]:
            by = NodeCollectives(call, self.place, kinds, mark)
            word = tf.identity(vectors[0][:1])
            means = step(by, self._scatter(by, vectors))
            by.fill(word)
            # If a rank owns nothing, nothing else depends on what it receives, and TensorFlow would
            # prune the exchange.
            with tf.control_dependencies(by.received):
                means = self._gather(by, means, tf.identity(word))
            return [means[at] for at in range(len(vectors))]

        return list(average(list(vectors)))

    def _kinds(self, settings: Settings, codec: Any) -> set[tuple[int, str]]:
        """Return all (bucket, kind of exchange) that any owner starts."""
        parts = [[self._sizes[at] for at in of_owner] for of_owner in self._owned]
        buckets = [[[of_owner[at] for at in part] for part in cut(of_owner)] for of_owner in parts]
        numbers, nodes = range(max(map(len, buckets))), len(self.place.layout.nodes)
        if settings.exchange == "shared":
            kinds = {(at, f"round{turn + 1}") for at in numbers for turn in range(_ROUNDS)}
            return kinds | {(at, f"{kind}_sums") for at, kind in kinds if nodes > 2}
        scattered = {
            (at, "parts")
            for of_owner in buckets
            for at, part in enumerate(of_owner)
            if settings.scatter and shares_of(codec, tuple(part), nodes) is not None
        }
        return scattered | {(at, "payload") for at in numbers}

    def _scatter(self, by: NodeCollectives, vectors: Sequence[Any]) -> dict[int, Any]:
        """Return the node's means of what this rank owns."""
        mine, inside = self._words[self.place.number], self.place.layout.nodes[self.place.node]
        words = tf.concat([vectors[at] for part in self._owned for at in part], 0)
        sizes = dict(zip(inside, self._words, strict=True))
        received = by.exchange(words, sizes, dict.fromkeys(inside, mine), "sn_sum")
        # In rank order, as on the host.
        mean = reduce(tf.add, (received[rank] for rank in inside)) / len(inside)
        return self._cut(mean, self.mine)

    def _gather(self, by: NodeCollectives, means: Mapping[int, Any], word: Any) -> dict[int, Any]:
        """Return all tensors' means, given this rank's; word : see NodeCollectives.fill."""
        mine, inside = self._words[self.place.number], self.place.layout.nodes[self.place.node]
        # A word of this rank's gradients is prepended: a rank that owns nothing would send a
        # constant, which TensorFlow would start immediately.
        sizes = [1 + words for words in self._words]
        words = tf.concat([word, *(means[at] for at in self.mine)], 0)
        received = by.exchange(
            tf.tile(words, [len(inside)]), dict.fromkeys(inside, 1 + mine),
            dict(zip(inside, sizes, strict=True)), "sn_means",
        )  # fmt: skip
        all_means: dict[int, Any] = {}
        for rank, part in zip(inside, self._owned, strict=True):
            all_means |= self._cut(received[rank][1:], part)
        return all_means

    def _cut(self, words: Any, places: Sequence[int]) -> dict[int, Any]:
        """Split concatenated tensors, by index."""
        pieces = tf.split(words, [self._sizes[at] for at in places]) if places else []
        return dict(zip(places, pieces, strict=True))


class NodeCollectives(Collectives):
    """Collectives among owners of the same local number, in the graph; all ranks run each of them.

    kinds : (bucket, kind) of all exchanges that any owner starts; see `fill`
    mark : prefix of the names of collectives

    Attributes
    ----------
    received : results of all-to-alls so far
    """

    def __init__(
        self, call: Call, place: Place, kinds: Iterable[tuple[int, str]], mark: str
    ) -> None:
        super().__init__(call)
        self._all_ranks, self._mark = self.ranks, mark
        self._owners = place.layout.across()[place.number]
        self.ranks, self.rank = len(place.layout.nodes), place.node
        self._kinds = set(kinds)
        self.received: list[Any] = []

    def named(self, words: Any, mark: str) -> tuple[Any, dict[str, Any]]:
        """See Collectives."""
        return words, super().named(words, mark)[1] | {"name": f"{self._mark}_{mark}"}

    def exchange(
        self, words: Any, to_ranks: Mapping[int, int], of_ranks: Mapping[int, int], mark: str
    ) -> dict[int, Any]:
        """Exchange words; return those received, by rank.

        words : what to send to each rank, concatenated in rank order
        to_ranks, of_ranks : number of elements sent to and received from each rank
        """
        splits = [to_ranks.get(rank, 0) for rank in range(self._all_ranks)]
        words, how = self.named(words, mark)
        received, _ = hvd.alltoall(words, splits=tf.constant(splits, tf.int32), **how)
        self.received.append(received)
        ranks = sorted(of_ranks)
        sizes = [of_ranks[rank] for rank in ranks]
        return dict(zip(ranks, tf.split(arrived(received, sizes), sizes), strict=True))

    def _between(
        self, parts: Sequence[Any], sizes: Sequence[int], number: int, kind: str
    ) -> list[Any]:
        """Send `parts` to the nodes; return the words received from each, in order."""
        # Started here, so `fill` need not.
        self._kinds.remove((number, kind))
        to = sorted(zip(self._owners, parts, strict=True), key=lambda pair: pair[0])
        received = self.exchange(
            tf.concat([part for _, part in to], 0),
            {rank: int(part.shape[0]) for rank, part in to},
            dict(zip(self._owners, sizes, strict=True)), f"sn_b{number}_{kind}",
        )  # fmt: skip
        return [received[rank] for rank in self._owners]

    def fill(self, word: Any) -> None:
        """Take part in the exchanges in which only other owners have anything to send.

        word : [1], computed in the step: a constant would be sent immediately
        """
        to_self = {self._owners[self.rank]: 1}
        for at, (number, kind) in enumerate(sorted(self._kinds)):
            # Different words each: TensorFlow would merge all-to-alls of equal words.
            self.exchange(one_of(word) + at, to_self, to_self, f"sn_b{number}_{kind}")

    def present(self, vector: Any, number: int) -> Any:
        """See Collectives; all are present, or `all_are_here` has ended the step."""
        return tf.constant([self.ranks])

    def total(self, words: Any, number: int, turn: int) -> Any:
        """See Collectives."""
        n, kind = int(words.shape[0]), f"round{turn}"
        if self.ranks == 2:  # as many bytes as below, in one round
            return reduce(tf.add, self._between([words] * 2, [n] * 2, number, kind))
        sizes = all_to_all.pieces_of(n, self.ranks)
        parts, mine = tf.split(words, sizes), [sizes[self.rank]] * self.ranks
        summed = reduce(tf.add, self._between(parts, mine, number, kind))
        return tf.concat(self._between([summed] * self.ranks, sizes, number, f"{kind}_sums"), 0)

    def gather(self, words: Any, sizes: Sequence[int], number: int) -> Any:
        """See Collectives."""
        return tf.concat(self._between([words] * self.ranks, sizes, number, "payload"), 0)

    def alltoall(
        self, words: Any, to_ranks: Sequence[int], of_ranks: Sequence[int], number: int
    ) -> Any:
        """See Collectives."""
        parts = tf.split(words, list(to_ranks))
        return tf.concat(self._between(parts, of_ranks, number, "parts"), 0)
