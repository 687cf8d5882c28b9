"""Calls of Horovod's TensorFlow by nodes: on the host, and as nodes of the graph.

Every collective is an all-to-all of all ranks (docs/decisions/0098). A step of the engine goes
through the rounds of `engine/all_to_all.py`, as many as owners need. In a graph their number has to
be known: it follows from sizes and settings, so a rank that owns less takes part with nothing.
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
_ROUNDS = 2  # of a sum, at most; see allreduce/methods


class Nodes(NodeStates):
    """Where a compression goes by nodes: its place, once that is known, and what it goes on from.

    Attributes
    ----------
    restarted : what was not sent, with which this rank began anew, until nodes are known
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(engine)
        self.restarted: dict[str, Any] | None = None
        self._settings = settings
        self._ranks = self._rank = 0
        self._known = elastic()  # where there are none
        self._brought: dict[str, Any] | None = None
        self._steady: dict[tuple[str, ...], int] = {}  # of calls, alike on all ranks

    def find(self, process_set: Any, total: Total) -> None:
        """See which nodes there are; blocks, on all ranks."""
        if self._known or process_set.process_set_id:
            return
        if may_have_nodes(self._settings, process_set):
            layout = horovods_layout(total, process_set)
            if layout is not None:
                self.place = Place(layout, process_set.rank())
        self._known, self._ranks, self._rank = True, process_set.size(), process_set.rank()
        if self.place is not None and self.restarted is not None:
            # It travels with the next gradients: their owners are not the ranks that hold it.
            self._engine.exchange.restart({})
            self._brought = self.restarted
        self.restarted = None
        self._settle()

    def changed(self) -> None:
        """Go on from what the engine has loaded; CompressError if that cannot be."""
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
        """Ranks of a node whose mean is remembered here."""
        saved = self.saved(self._ranks)
        return len(saved["nodes"][0]) if saved else 1

    def owns(self, name: str, elements: int) -> bool:
        """Whether this rank owns a tensor; without nodes each owns all."""
        place = self.place
        return place is None or place.owners.of(name, elements) == place.number

    def serve(self, call: Call) -> bool:
        """Whether a call goes by nodes: those of tapes and optimizers, over all ranks."""
        everyone = not call.process_set.process_set_id
        return self.place is not None and call.sources is not None and everyone

    def all_are_here(self, call: Call, vectors: Sequence[Any]) -> Any:
        """A node, [] int64 zero, for all else of a step to wait for; an error if a rank has joined.

        None where a call does not go by nodes, and eagerly, where `average` asks before anything is
        sent. In a graph Horovod's own all-reduces go on beside it: an error of the exchange would
        keep some ranks from beginning one for which others wait, or leave it applied on some.
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
        """That of a call's tensors, as nodes of the graph; None where it does not go by nodes."""
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
        """Average gradients in their place, on the host; all ranks call it with the same.

        mark : of the names of collectives
        count : told the bytes that this rank sends beside gradients
        """
        sets = call.process_set
        # Before anything is sent: Horovod has no all-to-all with a rank that joined.
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
        """Return for how many steps after one on the host all owners keep a call's sizes.

        steps_of : returns that for some tensors
        """
        assert self.place is not None
        owned = [name for name in names if self.place.owners.of_name[name] == self.place.number]
        steps = steps_of(owned)
        # Sizes of different owners change at different steps; a graph is for all ranks or for none.
        if self._settings.exchange == "shared":
            count(8)
            word = tf.constant([steps], tf.int64)
            least = hvd.allreduce(word, op=hvd.Min, name="sn.steady", process_set=process_set)
            steps = int(least.numpy()[0])
        self._steady[tuple(names)] = steps
        return steps

    def steps_left(self, key: tuple[str, ...], steps: int) -> int:
        """For how many steps a call can be a graph; with payloads `steps`, equal on all ranks."""
        agreed = self._steady.get(key, 0)
        on_host_first = self._brought is not None and key not in self._steady
        return agreed if self._settings.exchange == "shared" or on_host_first else steps

    def ended(self, key: tuple[str, ...], graph: GraphStep) -> None:
        """Nothing is known of a call beyond what its graph was made for."""
        if key in self._steady:
            self._steady[key] = graph.steps_left

    def count(self, nbytes: int) -> None:
        """Count what graphs have sent inside the node."""
        if self.place is not None:
            self.place.sent_bytes += nbytes

    def report(self) -> dict[str, float]:
        """What a report says of it; nothing without nodes."""
        steps = self._engine.traffic.steps
        return {} if self.place is None else self.place.report(steps)


class NodeSum:
    """The way of a call's gradients to their owners in a node and back, as nodes of the graph.

    sizes : elements by name, of all tensors of the call, alike on all ranks

    Attributes
    ----------
    mine : places of those that this rank owns, among all
    inside_bytes : that this rank sends to others of its node in a step
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
        """The means of all tensors.

        codec : of payloads, in the steps of the graph
        step : the exchange between nodes: of gradients, by place, their means
        """
        mark = tf.compat.v1.get_default_graph().unique_name("sn_nodes")
        kinds = self._kinds(settings, codec)

        # By itself: TensorFlow numbers the conditions of a graph, and names what is in Horovod's
        # own by that, so all ranks have to have as many, whatever they own.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def average(vectors: Sequence[Any]) -> list[Any]:
            by = NodeCollectives(call, self.place, kinds, mark)
            word = tf.identity(vectors[0][:1])
            means = step(by, self._scatter(by, vectors))
            by.fill(word)
            # Nothing else waits for what an owner of nothing receives, and TensorFlow would leave
            # out the exchange.
            with tf.control_dependencies(by.received):
                means = self._gather(by, means, tf.identity(word))
            return [means[at] for at in range(len(vectors))]

        return list(average(list(vectors)))

    def _kinds(self, settings: Settings, codec: Any) -> set[tuple[int, str]]:
        """Kinds of exchanges, by bucket, that owners of any number start."""
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
        """The node's means of what this rank owns."""
        mine, inside = self._words[self.place.number], self.place.layout.nodes[self.place.node]
        words = tf.concat([vectors[at] for part in self._owned for at in part], 0)
        sizes = dict(zip(inside, self._words, strict=True))
        received = by.exchange(words, sizes, dict.fromkeys(inside, mine), "sn_sum")
        # In this order, as on a host.
        mean = reduce(tf.add, (received[rank] for rank in inside)) / len(inside)
        return self._cut(mean, self.mine)

    def _gather(self, by: NodeCollectives, means: Mapping[int, Any], word: Any) -> dict[int, Any]:
        """Return all tensors' means, given this rank's; word : see NodeCollectives.fill."""
        mine, inside = self._words[self.place.number], self.place.layout.nodes[self.place.node]
        # A word of this rank's gradients goes in front: an owner of nothing would have a constant
        # to send, which TensorFlow starts at once.
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
        """Tensors that lie one behind the other, by place."""
        pieces = tf.split(words, [self._sizes[at] for at in places]) if places else []
        return dict(zip(places, pieces, strict=True))


class NodeCollectives(Collectives):
    """Those of the owners of one number, as nodes of the graph; all ranks take part in each.

    kinds : of what owners of any number begin, with the bucket's; see `fill`
    mark : of the names of collectives

    Attributes
    ----------
    received : what has come of all-to-alls so far
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
        """Return the words of each rank in `of_ranks`, by rank, so many elements each.

        words : what to send to each rank, in order of rank, one after another
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
        """Return the words of each node, in order; `parts` are sent to them."""
        # Begun here, so `fill` need not.
        self._kinds.remove((number, kind))
        to = sorted(zip(self._owners, parts, strict=True), key=lambda pair: pair[0])
        received = self.exchange(
            tf.concat([part for _, part in to], 0),
            {rank: int(part.shape[0]) for rank, part in to},
            dict(zip(self._owners, sizes, strict=True)), f"sn_b{number}_{kind}",
        )  # fmt: skip
        return [received[rank] for rank in self._owners]

    def fill(self, word: Any) -> None:
        """Take part in exchanges in which only other owners have anything to send.

        word : [1], computed in the step: a constant would be sent without waiting for anything
        """
        to_self = {self._owners[self.rank]: 1}
        for at, (number, kind) in enumerate(sorted(self._kinds)):
            # With other words each: TensorFlow would merge all-to-alls of equal ones.
            self.exchange(one_of(word) + at, to_self, to_self, f"sn_b{number}_{kind}")

    def present(self, vector: Any, number: int) -> Any:
        """See Collectives; all are, or `when_all_are_here` has ended the step."""
        return tf.constant([self.ranks])

    def total(self, words: Any, number: int, turn: int) -> Any:
        """See Collectives."""
        n, kind = int(words.shape[0]), f"round{turn}"
        if self.ranks == 2:  # as many bytes as below, at once
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
