"""Choice of the layers of a Keras model to recompute in the backward pass instead of packing.

A layer that is not packed keeps all of its intermediate results; a block of layers keeps those of
each. If recomputed (`modules/rerun.py`), it keeps only its inputs. The cheaper way is chosen on a
sample before a step is traced: bytes are counted in a trace, as tensors of the forward pass that
the gradients read; seconds of the layers, and of packing, are measured eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import keras
import tensorflow as tf

from .. import settings
from ..activations.saved import WIDTHS, Cost, Saved, Timed, cheapest_reruns, packing_of, rates_of
from ..base.sizes import show_bytes
from ..cost.op_times import quickest
from ..plan.plan import BudgetError
from .guards import refilled, tensors_in
from .memory import bytes_of
from .model import as_tensors, has_values, put_back, restore_model, uncast, variables_of, wait_for
from .modules.backend import Probe
from .modules.rerun import Function, Rerun, Section, run_in_sections
from .trace.kernels import READS

# Ops that return the memory of their first input.
_VIEWS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient")
# Ops whose tensors exist anyway, or are not results of the forward pass.
_THERE = ("Placeholder", "Const", "VarHandleOp", READS)


# Makes a model's layers pack, except those with these ids; returns a CompressedActivations, which
# cannot be imported here.
Pack = Callable[[Collection[int]], Any]


@dataclass(frozen=True)
class Mix:
    """A choice of sections to recompute.

    sections, names : the sections that run again, and their names
    price : seconds that packing takes per byte that it frees
    saved : bytes of the sample's forward pass, and how they are divided
    kept_bytes : bytes of `saved` that no layer packs: inputs of recomputed sections, and the rest
    start_bits : the most bits of packed inputs at which the budget is kept; 8 without a budget
    """

    sections: tuple[Section, ...]
    names: tuple[str, ...]
    price: float
    saved: Saved
    kept_bytes: int
    start_bits: int


def layers_in(sections: Iterable[Section]) -> set[int]:
    """Return the ids of the layers of some sections."""
    operations = [item.operation for section in sections for item in section.items]
    return {
        id(layer)
        for operation in operations
        for layer in (
            operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else ()
        )
    }


def cheapest_mix(model: Any, sample: Any, pack: Pack, budget_bytes: int | None) -> Mix:
    """Return the cheapest choice of what to recompute in a model.

    sample : arguments of its calls in training; left unchanged
    budget_bytes : of all that the forward pass keeps. None: four times the price of packing is paid

    Raises BudgetError if no choice fits, with the smallest that was found; TypeError for a sample
    without values.
    """
    if not has_values(sample):
        raise TypeError(
            "compress_activations: got a tf.TensorSpec in the sample, which is run to measure "
            "seconds; expected tensors or arrays. Pass one batch of what the model is trained on."
        )
    args = as_tensors(sample)
    if not model.built:
        model(*args)  # not for training, which would change its state
    with put_back(variables_of(model)), restore_model(model):
        return _Search(model, args, pack, budget_bytes).mix()


@dataclass(frozen=True)
class _Place:
    """A section that may run again, and the names of the places that contain it."""

    section: Section
    around: tuple[str, ...]


class _Search:
    """Measures a model on a sample, and chooses."""

    def __init__(self, model: Any, args: tuple[Any, ...], pack: Pack, budget: int | None) -> None:
        self.model, self.args, self.pack, self.budget = model, args, pack, budget
        self.places = dict(_places(Probe(model, args), model))
        self.seconds = _seconds(self.places, model, args)
        self.plain = _Count(model, args, self.places)
        trial = pack(())
        try:
            self.timed, self.packed = _packing(trial, model, args), trial.controller
            self.now = _Count(model, args, self.places)
            self.keys = {key: id(layer) for key, layer in trial.keys.items()}
        finally:
            trial.close()
        self.held = 0.0  # where nothing runs again
        self._kept = {frozenset[str](): self.now.all}

    def mix(self) -> Mix:
        """Choose the sections to recompute."""
        # The price of a byte: seconds of packing everything per byte that this frees.
        rates = rates_of(self.timed)
        every = packing_of(self.timed, rates)
        freed = sum(self.plain.all) - sum(self.now.all) - every.held_bytes
        price = every.seconds / freed if freed > 0 else 0.0
        self.held = sum(self.now.all) + every.held_bytes
        # The cost of each place if it is kept, and if it runs again.
        kept, again = {}, {}
        for name in self.places:
            plain_bytes = self.plain.left.get(name, 0)
            parts = any(name in other.around for other in self.places.values())
            # All that its parts keep is held at once when it runs again. And if bytes stand for
            # seconds, they do not reflect the time of its matrix products.
            if parts and (settings.deterministic or plain_bytes >= self.held):
                continue
            packing = packing_of(self._timed_of([name]), rates)
            # If each run must choose the same, bytes stand for seconds.
            seconds = plain_bytes if settings.deterministic else self.seconds.get(name, 0.0)
            held = self.now.left.get(name, 0) + packing.held_bytes
            kept[name] = Cost(packing.seconds, plain_bytes, held)
            again[name] = Cost(seconds, plain_bytes, self.now.inputs.get(name, 0))

        def fits(names: Iterable[str]) -> bool:
            freed = sum(kept[name].held_bytes - again[name].held_bytes for name in names)
            # A trace takes long, and is skipped if the sum, which ignores sharing, is far off.
            budget = self.budget or 0
            near = self.held_bytes((), 4) - freed <= _NEAR * budget
            return near and self.held_bytes(tuple(names), 4) <= budget

        chosen = cheapest_reruns(
            kept, again, self._first_price(price, kept, again),
            within=lambda name, other: other in self.places[name].around,
            fits=None if self.budget is None else fits,
        )  # fmt: skip
        # In the model's order, as `sections` joins neighbours.
        names = tuple(name for name in self.places if name in chosen)
        least = self.held_bytes(names, 1)
        if self.budget is not None and least > self.budget:
            raise BudgetError(
                f"compress_activations: what the layers keep takes {least} bytes "
                f"({show_bytes(least)}) at the fewest bits, where all runs again that frees bytes; "
                f"expected {self.budget} at most. Raise the budget, or give a smaller batch.",
                peak_bytes=least,
                budget_bytes=self.budget,
                op=max(self.now.left, key=self.now.left.__getitem__, default=""),
            )
        return self._mix(names, price)

    def _first_price(self, price: float, kept: dict[str, Cost], again: dict[str, Cost]) -> float:
        """Return the initial price of a byte: 0 if the budget has room for everything."""
        if self.budget is None:
            return price
        # Unlike in torch: a choice that fits with the most bits costs no more time (decision 105).
        if self.held_bytes((), 8) <= self.budget:
            return 0.0
        freed = {name: kept[name].held_bytes - again[name].held_bytes for name in again}
        # If nothing is packed: the cost of a byte at the place that is cheapest to run again.
        prices = [again[name].seconds / freed[name] for name in again if freed[name] > 0]
        return price or min(prices, default=0.0)

    def _mix(self, names: tuple[str, ...], price: float) -> Mix:
        sections = self.sections(names)
        inside = {key for row in self._timed_of(names) for key in row.within}
        packed = [key for row in self.timed for key in row.within if key not in inside]
        kept, plain_bytes = self.kept(names), sum(self.plain.all)
        # With reruns but without packing: what the reruns alone free.
        unpacked_bytes = sum(self._counted(sections)) if names else plain_bytes
        ways = (
            ("layers run again", len(names), plain_bytes - unpacked_bytes),
            ("tensors packed", len(packed), unpacked_bytes - sum(kept)),
            ("left as they are", len(kept), sum(kept)),
        )
        held = sum(kept) + self.packed.held_under(packed)
        elements = sum(row.n for row in self.packed.rows() if row.key in packed)
        saved, budget = Saved(plain_bytes, held, elements, ways), self.budget
        start_bits = max(
            bits for bits in WIDTHS if budget is None or self.held_bytes(names, bits) <= budget
        )
        return Mix(sections, names, price, saved, sum(kept), start_bits)

    def _timed_of(self, names: Sequence[str]) -> list[Timed]:
        """Return the packed tensors of layers in these places."""
        layers = layers_in(self.places[name].section for name in names)
        return [row for row in self.timed if any(self.keys[key] in layers for key in row.within)]

    def held_bytes(self, names: Sequence[str], bits: int) -> int:
        """Return the bytes held if these run again and inputs of the others take `bits` bits."""
        inside = {key for row in self._timed_of(names) for key in row.within}
        return sum(self.kept(names)) + self.packed.held_under(
            [key for key in self.keys if key not in inside], bits
        )

    def kept(self, names: Sequence[str]) -> list[int]:
        """Return the sizes of tensors held unpacked if these run again, shared ones once."""
        chosen = frozenset(names)
        if chosen not in self._kept:
            sections = self.sections(names)
            trial = self.pack(layers_in(sections))
            try:
                self._kept[chosen] = self._counted(sections)
            finally:
                trial.close()
        return self._kept[chosen]

    def sections(self, names: Collection[str]) -> tuple[Section, ...]:
        """Return the sections to run again, neighbouring layers joined while they keep little."""
        sections: list[Section] = []
        for name in (name for name in self.places if name in names):
            more, left = self.places[name].section, self.plain.left[name]
            last = sections[-1] if sections else more
            items = more.chain.items
            joins = last.chain is more.chain and items.index(last.items[-1]) + 1 == items.index(
                more.items[0]
            )
            # If joined, the tensor between them is not kept; but all their results are held at
            # once when they run again.
            if joins and last.saved_bytes + left < self.held:
                changed = (*last.changed, *more.changed)
                sections[-1] = Section(
                    last.chain, (*last.items, *more.items), changed, last.saved_bytes + left
                )
            else:
                sections.append(replace(more, saved_bytes=left))
        return tuple(sections)

    def _counted(self, sections: Sequence[Section]) -> list[int]:
        """Return the sizes of tensors that the model currently keeps if sections run again."""
        with run_in_sections(sections, self.model):
            return _Count(self.model, self.args, {}).all


def _places(probe: Probe, model: Any) -> Iterator[tuple[str, _Place]]:
    """Yield what can run again, a layer before its parts. Layers used twice are skipped."""
    chains = [chain for chains in probe.chains.values() for chain in chains]
    uses = Counter(id(item.operation) for chain in chains for item in chain.items)
    seen: Counter[str] = Counter()

    def visit(layer: Any, around: tuple[str, ...]) -> Iterator[tuple[str, _Place]]:
        for chain in probe.chains.get(layer, []):
            for item in chain.items:
                did, inside = probe.behaviour[item], around
                if did.calls and did.repeatable and uses[id(item.operation)] == 1:
                    seen[item.name] += 1
                    count = f":{seen[item.name]}" if seen[item.name] > 1 else ""
                    inside = (*around, item.name + count)
                    yield inside[-1], _Place(Section(chain, (item,), tuple(did.changed)), around)
                yield from visit(item.operation, inside)

    yield from visit(model, ())


def _watched(places: dict[str, _Place], watch: Rerun, model: Any) -> AbstractContextManager[None]:
    """Run all places through `watch`, including those that contain others."""
    return run_in_sections([place.section for place in places.values()], model, watch)


def _seconds(places: dict[str, _Place], model: Any, args: tuple[Any, ...]) -> dict[str, float]:
    """Return the seconds of the forward pass of each place, each run as a separate graph."""
    taken: dict[str, float] = {}
    names = {place.section: name for name, place in places.items()}

    def watch(section: Section, function: Function, inputs: list[Any]) -> list[Any]:
        results = function(inputs)
        # Not inside the function of an enclosing place, which is traced with this same watch.
        if tf.executing_eagerly():
            alone = tf.function(lambda *tensors: function(list(tensors)), autograph=False)
            name = names[section]
            taken[name] = taken.get(name, 0.0) + quickest(
                lambda: wait_for(alone(*inputs)), perf_counter
            )
        return results

    with _watched(places, watch, model):
        model(*args, training=True)
    return taken


# A choice is traced only if its bytes, by a sum, are at most this multiple of the budget.
_NEAR = 2
# Runs of which the fastest counts, after a warm-up.
_RUNS = 3


def _packing(trial: Any, model: Any, args: tuple[Any, ...]) -> list[Timed]:
    """Return the seconds and bytes of a model's packed tensors, run eagerly."""
    weights, runs = uncast(model.trainable_variables), []
    for _ in range(1 + _RUNS):
        # With the backward pass, which unpacks.
        with tf.GradientTape() as tape:
            results = tensors_in(model(*args, training=True))
        tape.gradient([result for result in results if result.dtype.is_floating], weights)
        runs.append(trial.seconds())
    rows = {row.key: row for row in trial.controller.rows()}
    timed = []
    for key in runs[-1]:
        held = trial.controller.held_under([key])
        nbytes = 4 * rows[key].n if key in rows else held
        seconds = float(nbytes) if settings.deterministic else min(run[key] for run in runs[1:])
        method = "rounded" if key in rows else key.rpartition("/")[2]
        timed.append(Timed(frozenset([key]), method, key in rows, nbytes, 0, held, seconds))
    return timed


class _Count:
    """Bytes of a forward pass that gradients read, without the model's inputs and variables.

    all : of each tensor of the model
    left : per place, of it alone: tensors it makes, and its inputs and outputs that gradients read
    inputs : per place, of its inputs

    Packed bytes have no size in a trace, and do not count.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], places: dict[str, _Place]) -> None:
        self.left: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        self._names = {place.section: name for name, place in places.items()}
        self._alone = False
        tensors = tensors_in(args)

        def call(inputs: list[Any]) -> list[Any]:
            return tensors_in(model(*refilled(args, inputs), training=True))

        self.all = _left_bytes(call, tensors, free=set(range(len(tensors))))
        with tf.__internal__.FuncGraph("all").as_default(), _watched(places, self._watch, model):
            call(_placeholders(tensors))

    def _watch(self, section: Section, function: Function, inputs: list[Any]) -> list[Any]:
        results = function(inputs)
        # While a place is counted alone, it runs its inner places, which are counted separately.
        if self._alone:
            return results
        self._alone = True
        try:
            name, roots = self._names[section], [_root(value) for value in inputs]
            free = {slot for slot, root in enumerate(roots) if root.op.type in _THERE}
            # By memory: two inputs may be views of the same tensor.
            held = {root.ref(): bytes_of(root) for root in roots if root.op.type not in _THERE}
            self.left[name] = self.left.get(name, 0) + sum(_left_bytes(function, inputs, free))
            self.inputs[name] = self.inputs.get(name, 0) + sum(held.values())
        finally:
            self._alone = False
        return results


def _left_bytes(function: Function, arguments: list[Any], free: set[int]) -> list[int]:
    """Return the sizes of tensors that a function's gradients read; `free` inputs do not count."""
    graph = tf.__internal__.FuncGraph("alone")
    with graph.as_default():
        inputs = _placeholders(arguments)
        counted = [value for slot, value in enumerate(inputs) if slot not in free]
        wanted = [value for value in counted if value.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(wanted)
            results = [value for value in function(inputs) if value.dtype.is_floating]
        forward = len(graph.get_operations())
        sources = [*wanted, *tape.watched_variables()]
        tape.gradient(results, sources, _placeholders(results))
    # Results of the forward pass that ops of the backward pass, traced after it, read.
    ops = graph.get_operations()
    names, own = {op.name for op in ops[:forward]}, {value.ref() for value in counted}
    roots = {_root(value).ref() for op in ops[forward:] for value in op.inputs}
    return [
        bytes_of(root.deref())
        for root in roots
        if root in own or (root.deref().op.name in names and root.deref().op.type not in _THERE)
    ]


def _placeholders(like: Iterable[Any]) -> list[Any]:
    return [tf.compat.v1.placeholder(value.dtype, value.shape) for value in like]


def _root(value: Any) -> Any:
    """Return the tensor of a graph whose memory a tensor uses."""
    while value.op.type in _VIEWS:
        value = value.op.inputs[0]
    return value
