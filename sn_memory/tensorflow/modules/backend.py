"""The back end for models that cannot be traced: recomputes chosen layers in the backward pass.

The sample is run: seconds and bytes of each layer are measured, adjacent layers are joined, and the
peak of each choice is measured by the allocator's trace of a step. So the budget is either kept on
the sample or refused. Keras' own RematScope recomputes only layers that are called without keyword
arguments, chooses by the size of the output, and measures nothing.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...base.sizes import parse_bytes
from ...run.measured_choice import MeasuredPlan, measured_plan, min_recompute
from ..errors import TraceError
from ..guards import Call, Settings, opaque, tensors_in
from ..memory import MARK, Allocations, bytes_of, has_statistics, main_device
from ..model import (
    as_specs,
    as_tensors,
    has_values,
    model_step,
    put_back,
    restore_model,
    twin_of,
    variables_of,
)
from ..trace import kernels
from ..trace.small_blocks import small_bytes
from .rerun import Chain, Item, Section, chains_of, crossing, run_in_sections, watched

log = logging.getLogger(__name__)

# Nested models are opened to this depth only: deeper layers are mostly single ops.
_DEPTH = 3
# Numbers of sections to divide the bytes that the model keeps for the backward pass into.
_PARTS = (4, 8, 16)
# TensorFlow's executor runs ops in another order each time, and each order has its own peak: two
# LSTMs hold 38 MiB in two of three steps, and 74 in the third. Up to _STEPS steps are measured in
# _STEPS_S seconds, but at least _LEAST_STEPS: eight miss the third once in 25 times.
_STEPS, _STEPS_S, _LEAST_STEPS = 16, 4.0, 8
# If steps differed, the next may differ by more: their range divided by this is the margin.
_MARGIN = 4
# Divides the rows of a sample that may not fit.
_SHARE = 4


@dataclass
class Behaviour:
    """Measurements of an item, over all its calls in one forward pass."""

    calls: int = 0
    seconds: float = 0.0
    # Requested in its calls and held after them, excluding its results.
    left_bytes: int = 0
    # Per result of its last call.
    result_bytes: tuple[int, ...] = ()
    # Keras variables that it changed.
    changed: list[Any] = field(default_factory=list)
    repeatable: bool = True


class Probe:
    """Measures each part of a model in a forward pass, which changes variables and attributes.

    The sample runs once eagerly under a tape, for seconds and bytes; and once symbolically in
    Keras' stateless scope, which records updates of variables. An item with any other effect
    (stateful random ops, variables of TensorFlow's own, losses added inside, attributes set,
    Python's or NumPy's random numbers) would not behave the same when recomputed: it is not
    repeatable. Nor is one that reads variables unseen by Keras, as in a tf.function of a layer:
    they may have been updated by then.

    device : its allocator is measured. If that has no statistics, or for None, the sizes of results
        stand in for the bytes that items leave.

    chains : all chains of the model, at any depth, by the layer directly above them
    behaviour : per item
    held : per item, bytes held once it has run, beyond those held at the start
    """

    def __init__(self, model: Any, args: tuple[Any, ...], device: str | None = None) -> None:
        self.chains: dict[Any, list[Chain]] = {}
        layers = [model]
        while layers:
            layer = layers.pop()
            # A layer may occur in a model twice.
            if layer not in self.chains:
                self.chains[layer] = chains_of(layer)
                inside = [item.operation for chain in self.chains[layer] for item in chain.items]
                layers += [layer for layer in inside if isinstance(layer, keras.layers.Layer)]
        self._all = [chain for chains in self.chains.values() for chain in chains]
        self.behaviour = {item: Behaviour() for chain in self._all for item in chain.items}
        self.held: dict[Item, int] = {}
        # A warm-up: loads kernels, and layers set the attributes that a first call sets.
        model(*args, training=True)
        if device is not None and has_statistics(device):
            self._measure(model, args, device)
        else:
            self._by_results(model, args)
        self._trace(model, args)

    def left_bytes(self, chain: Chain, items: tuple[Item, ...]) -> int:
        """Bytes that adjacent items leave, except for results that are needed after them."""
        if chain.functional is None:
            (item,) = items
            return self.behaviour[item].left_bytes
        # Not the sum over items: results between them are not kept if both are recomputed.
        first = chain.items.index(items[0])
        before = self.held[chain.items[first - 1]] if first else 0
        inside = {id(out) for item in items for out in item.node.outputs}
        leave = self.crossing_bytes(chain, items[-1], only=inside)
        return self.held[items[-1]] - before - leave

    def crossing_bytes(self, chain: Chain, last: Item, only: set[int] | None = None) -> int:
        """Bytes of the tensors computed up to an item and needed after it."""
        place = chain.items.index(last)
        sizes = {
            id(out): size
            for item in chain.items[: place + 1]
            for out, size in zip(item.node.outputs, self.behaviour[item].result_bytes, strict=True)
        }
        return sum(
            sizes[tensor] for tensor in crossing(chain)[place] if only is None or tensor in only
        )

    def _measure(self, model: Any, args: tuple[Any, ...], device: str) -> None:
        marks: dict[str, Item] = {}

        # Two empty marks, not one around the call: held bytes are read at the end of a mark, and
        # the bytes that the call adds are needed.
        def around(item: Item, call: Callable[[], Any]) -> Any:
            name = f"{MARK}{len(marks)}"
            marks[name] = item
            with tf.profiler.experimental.Trace(f"{name} begins"):
                pass
            results = self._called(item, call)
            with tf.profiler.experimental.Trace(name):
                pass
            return results

        with watched(self._all, around), Allocations(device) as asked_for:
            with tf.GradientTape() as tape:
                results = model(*args, training=True)
            del tape, results
        for name, item in marks.items():
            begin, end = asked_for.held_bytes[f"{name} begins"], asked_for.held_bytes[name]
            behaviour = self.behaviour[item]
            behaviour.left_bytes += end - begin - sum(behaviour.result_bytes)
            self.held[item] = end

    def _called(self, item: Item, call: Callable[[], Any]) -> Any:
        """Run the call; record its seconds and the bytes of its results."""
        began = time.perf_counter()
        results = call()
        behaviour = self.behaviour[item]
        behaviour.seconds += time.perf_counter() - began
        behaviour.calls += 1
        behaviour.result_bytes = tuple(map(bytes_of, tensors_in(results)))
        return results

    def _by_results(self, model: Any, args: tuple[Any, ...]) -> None:
        """Use the sizes of results as the bytes that items leave."""
        held = 0

        def around(item: Item, call: Callable[[], Any]) -> Any:
            nonlocal held
            results = self._called(item, call)
            size = sum(self.behaviour[item].result_bytes)
            self.behaviour[item].left_bytes += size
            # The results, and as many bytes again left for the backward pass.
            held += 2 * size
            self.held[item] = held
            return results

        with watched(self._all, around):
            model(*args, training=True)

    def _trace(self, model: Any, args: tuple[Any, ...]) -> None:
        """Find out which items can be recomputed, and which variables they change."""
        variables = {id(v): v for v in variables_of(model)}
        weights = {id(v) for v in model.trainable_variables}

        def around(item: Item, call: Callable[[], Any]) -> Any:
            graph = tf.compat.v1.get_default_graph()
            count, updates = len(graph.get_operations()), dict(scope.state_mapping)
            before, attributes = (len(scope.losses), _rng_state()), _attributes(item.operation)
            results = call()
            behaviour = self.behaviour[item]
            now = scope.state_mapping.items()
            changed = [key for key, value in now if updates.get(key) is not value]
            behaviour.changed += [variables[key] for key in changed if key in variables]
            ops = graph.get_operations()[count:]
            seen = {id(graph.capture(v._value.handle)) for v in scope.read.values()}
            behaviour.repeatable &= (
                # Changes only known variables, and no weight: its gradient would be lost.
                all(key in variables and key not in weights for key in changed)
                and (len(scope.losses), _rng_state()) == before
                and _same(_attributes(item.operation), attributes)
                and not any(kernels.has_effect(op) or kernels.is_random(op) for op in ops)
                and all(id(v) in seen for op in ops for v in kernels.variables_read(op))
                # Not in the body of a loop, where our custom gradient cannot read variables.
                and graph is top[-1]
                # Tensors inside opaque objects would have no gradient.
                and opaque(results) is None
            )
            return results

        top: list[Any] = []

        def forward(*inputs: Any) -> None:
            top.append(tf.compat.v1.get_default_graph())
            model(*inputs, training=True)

        scope = _Watching(collect_losses=True)
        with watched(self._all, around), scope:
            tf.function(forward, autograph=False).get_concrete_function(*as_specs(args))
        for layer in self.chains:
            if isinstance(layer, keras.layers.Layer):
                layer._clear_losses()


class _Watching(keras.StatelessScope):  # type: ignore[misc]
    """A stateless scope that records which Keras variables are read in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.read: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


def _attributes(operation: Any) -> list[dict[str, Any]]:
    """Return copies of the attributes of a layer and of the layers in it."""
    inside = operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []
    return [dict(layer.__dict__) for layer in inside]


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        left.keys() == right.keys() and all(left[key] is right[key] for key in left)
        for left, right in zip(one, other, strict=True)
    )


def _rng_state() -> tuple[Any, str]:
    # As text: the state contains an array, which `==` would compare elementwise.
    legacy: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return random.getstate(), repr(legacy.get_state(legacy=False))


@dataclass(frozen=True)
class _Measured:
    peak_bytes: int
    peak_op: str


# Stands for a step that was not measured.
_NONE = _Measured(0, "")


@dataclass(eq=False)
class LayerStep:
    """The step of a model with chosen layers recomputed in the backward pass.

    plan : from measured steps
    sections : recomputed in the backward pass
    base_bytes : counted besides what ops request: variables, the sample, the optimizer's state
    """

    plan: MeasuredPlan
    sections: tuple[Section, ...]
    base_bytes: int
    # Empty, as it runs the model's own call, which reads current settings.
    settings: Settings = field(default_factory=dict)
    # Its peak includes the blocks that the allocator's trace does not show.
    counts_small_blocks = True

    @property
    def peak_op(self) -> str:
        return self.plan.peak_op

    def run(self, model: Any, own_call: Callable[..., Any], call: Call) -> Any:
        """Run a model's own call; the backward pass recomputes the chosen sections."""
        with run_in_sections(self.sections, model):
            return own_call(*call.args, **call.kwargs)


def layer_step(
    model: Any,
    sample: Any,
    budget: float | str,
    *,
    resident_bytes: int = 0,
    safely: bool = False,
) -> LayerStep:
    """Choose the layers of a model to recompute.

    model, sample, budget : the plain model and a real sample; the model is run, and left as it was.
    resident_bytes : bytes that count besides the step: the optimizer's state.
    safely : the sample may not fit without a plan: synthetic values replace it, the bytes that
        layers leave are measured on a quarter of its rows if that shows them, and no step without
        recomputation is run. If no choice keeps the budget, the one with the smallest peak is used.
        If the device has no allocator statistics, all of the finest cut is recomputed, unmeasured.

    Raises TraceError if the sample has no values, or the device's allocator no statistics; with
    `safely`, if nothing can be recomputed.
    Raises BudgetError if no choice of layers keeps the budget on the sample; not with `safely`.
    """
    args = sample if isinstance(sample, tuple) else (sample,)
    if safely:
        args = tf.nest.map_structure(_synthetic, args)
    if not has_values(args):
        raise TraceError(
            "planning by layers runs the model, and the sample is a tf.TensorSpec. Pass a "
            "tensor, or change the model so that it can be traced."
        )
    args = as_tensors(args)
    variables = variables_of(model)
    base_bytes = resident_bytes + sum(map(bytes_of, (*variables, *tensors_in(args))))
    with put_back(variables), restore_model(model):
        return _Search(model, args, base_bytes, safely=safely).step(budget)


def _synthetic(leaf: Any) -> Any:
    """Return values for a tf.TensorSpec: random numbers, zeros or True."""
    if not isinstance(leaf, tf.TensorSpec):
        return leaf
    if leaf.dtype.is_floating:
        return tf.random.stateless_normal(leaf.shape, (1, 2), dtype=leaf.dtype)
    return tf.cast(tf.fill(leaf.shape, leaf.dtype == tf.bool), leaf.dtype)


class _InSections:
    """Mixin for a model whose `call` recomputes the sections being measured."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with run_in_sections(self.__dict__["_sn_memory_sections"], self):
            return super().call(*args, **kwargs)  # type: ignore[misc]


class _Search:
    """Searches for the layers to recompute: probes once, then measures choices."""

    def __init__(self, model: Any, args: tuple[Any, ...], base_bytes: int, *, safely: bool) -> None:
        self.model, self.args, self.base_bytes, self.safely = model, args, base_bytes, safely
        self.device = main_device()
        self.twin = twin_of(model, _InSections)
        # Ratio of the sample's bytes to those measured by the probe.
        self.scale = 1
        self.probe = self.of_few_rows() if safely else Probe(model, args, self.device)

    def of_few_rows(self) -> Probe:
        """Measure a quarter of the rows, or all if those leave blocks too small to be seen."""
        rows = {value.shape[0] if value.shape.rank else 0 for value in tensors_in(self.args)}
        count = rows.pop() // _SHARE if len(rows) == 1 else 0
        if count:
            few = tf.nest.map_structure(
                lambda value: value[:count] if isinstance(value, tf.Tensor) else value, self.args
            )
            try:
                probe = Probe(self.model, few, self.device)
            except Exception as error:  # noqa: BLE001 - a model may take one number of rows only
                log.info("a quarter of the rows is no sample: %s", error)
            else:
                if self.leaves_bytes(probe):
                    self.scale = _SHARE
                    return probe
        return Probe(self.model, self.args, self.device)

    @staticmethod
    def leaves_bytes(probe: Probe) -> bool:
        return any(behaviour.left_bytes > 0 for behaviour in probe.behaviour.values())

    def step(self, budget: float | str) -> LayerStep:
        # Without `safely`, an allocator without statistics raises an error below.
        counts = not self.safely or has_statistics(self.device)
        baseline = _NONE if self.safely else self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        # First, the cut with the smallest peak when all its sections are recomputed.
        if counts:
            sections, best = self.cut(baseline, budget_bytes)
        else:
            sections, best = self.divide(_DEPTH, _PARTS[-1]), _NONE
        if self.safely and not sections:
            if self.leaves_bytes(self.probe) or not counts:
                raise TraceError("none of its layers can be run again")
            # The blocks that layers leave are too small to be seen.
            best = self.measured([], 0)
        # Cuts were compared by two steps each; the chosen one is judged by the worst of many.
        if sections and not self.safely and best.peak_bytes <= budget_bytes:
            best = self.measured(sections)
        # Then, as few of its sections as keep the budget.
        chosen = sections
        if not self.safely or (counts and best.peak_bytes <= budget_bytes):
            chosen, best = min_recompute(
                sections,
                best,
                lambda again: self.measured(again, budget_bytes),
                budget_bytes=budget_bytes,
                baseline_bytes=baseline.peak_bytes,
                how="with layers run again",
            )
        forward_s = sum(
            self.probe.behaviour[item].seconds
            for chain in self.probe.chains[self.model]
            for item in chain.items
        )
        plan = measured_plan(
            sections, chosen, best, baseline, budget_bytes=budget_bytes, baseline_seconds=forward_s
        )
        return LayerStep(plan, tuple(chosen), self.base_bytes)

    def cut(self, baseline: _Measured, budget_bytes: int) -> tuple[list[Section], _Measured]:
        """Return the sections whose step has the smallest peak, all recomputed; and that step."""
        best: tuple[list[Section], _Measured] = ([], baseline)
        if baseline is not _NONE and baseline.peak_bytes <= budget_bytes:
            return best
        seen: set[tuple[tuple[Item, ...], ...]] = set()
        for depth in range(1, _DEPTH + 1):
            for parts in _PARTS:
                sections = self.divide(depth, parts)
                items = tuple(section.items for section in sections)
                if not sections or items in seen:
                    continue
                seen.add(items)
                # With a budget of 0, which any step exceeds, so that two steps suffice.
                step = self.measured(sections, 0)
                if best[1] is _NONE or step.peak_bytes < best[1].peak_bytes:
                    best = (sections, step)
        return best

    def divide(self, depth: int, parts: int) -> list[Section]:
        """Divide the recomputable items, opened to a depth, into about `parts` sections."""
        stretches = list(self.stretches(self.model, depth))
        wanted = sum(self.probe.left_bytes(*stretch) for stretch in stretches) // parts
        return [section for stretch in stretches for section in self.divided(*stretch, wanted)]

    def stretches(self, layer: Any, depth: int) -> Iterator[tuple[Chain, tuple[Item, ...]]]:
        """Yield runs of recomputable items; the others are opened, at any depth."""
        for chain in self.probe.chains[layer]:
            row: list[Item] = []
            for item in chain.items:
                behaviour = self.probe.behaviour[item]
                opened = self.probe.chains.get(item.operation, [])
                if behaviour.calls and behaviour.repeatable and not (opened and depth > 1):
                    row.append(item)
                    continue
                if row:
                    yield chain, tuple(row)
                row = []
                if opened:
                    yield from self.stretches(item.operation, depth - 1)
            if row:
                yield chain, tuple(row)

    def divided(self, chain: Chain, items: tuple[Item, ...], wanted: int) -> Iterator[Section]:
        """Divide a stretch into sections that leave about `wanted` bytes, where little crosses."""
        probe = self.probe
        ends, begin = [0], 0
        while chain.functional is not None and begin < len(items):
            left = {
                end: probe.left_bytes(chain, items[begin:end])
                for end in range(begin + 1, len(items))
            }
            # Of the ends near `wanted`, the last of those where the fewest bytes cross.
            near = [end for end, size in left.items() if 0.5 * wanted <= size <= 1.5 * wanted]
            if not near:
                near = [next((end for end, size in left.items() if size >= wanted), len(items))]
            begin = min(near, key=lambda end: (probe.crossing_bytes(chain, items[end - 1]), -end))
            ends.append(begin)
        if ends[-1] < len(items):
            ends.append(len(items))
        for one, other in pairwise(ends):
            part = items[one:other]
            behaviours = [probe.behaviour[item] for item in part]
            # A layer that is called twice changes its variables twice.
            changed = {
                id(variable): variable for behaviour in behaviours for variable in behaviour.changed
            }
            saved = self.scale * probe.left_bytes(chain, part)
            if saved > 0:
                seconds = sum(behaviour.seconds for behaviour in behaviours)
                yield Section(chain, part, tuple(changed.values()), saved, seconds)

    def measured(self, sections: Sequence[Section], budget_bytes: int | None = None) -> _Measured:
        """Measure steps of the sample with sections recomputed.

        Returns the worst of two, if above the budget; else of many, plus a margin for later steps.
        The model without recomputation gets no margin.
        """
        self.twin.__dict__["_sn_memory_sections"] = tuple(sections)
        step = model_step(self.twin).get_concrete_function(*self.args)
        base = self.base_bytes + small_bytes(step.graph, self.device)
        # A function's first call folds constants; no later step allocates their bytes.
        step(*self.args)
        peaks, op = self.counted(step, 2)
        if budget_bytes is None or base + max(peaks) <= budget_bytes:
            more, op_of_more = self.counted(step, _STEPS - 2)
            op = op if max(peaks) > max(more) else op_of_more
            peaks += more
        margin = (max(peaks) - min(peaks)) // _MARGIN if sections else 0
        return _Measured(base + max(peaks) + margin, op)

    def counted(self, step: Any, count: int) -> tuple[list[int], str]:
        """Return the peaks of up to `count` steps, fewer if they are slow, and the peak's op."""
        with Allocations(self.device) as asked_for:
            began = time.perf_counter()
            for number in range(count):
                if number >= _LEAST_STEPS and time.perf_counter() - began > _STEPS_S:
                    break
                with tf.profiler.experimental.Trace(f"{MARK}{number}"):
                    step(*self.args)
        op = asked_for.holders[0].op if asked_for.holders else "the variables"
        return list(asked_for.scratch_bytes.values()), op
