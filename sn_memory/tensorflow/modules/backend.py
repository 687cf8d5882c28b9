"""The back end for models that cannot be traced: chosen layers run again in the backward pass.

The sample is run: seconds and bytes of each layer are measured, neighbouring layers are joined, and
the peak of each choice is measured by the allocator's trace of a step. So the budget is kept on the
sample, or refused. Keras' own RematScope reruns only layers that are called without keyword
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

# Models in models are opened no further than this: deeper layers are mostly single ops.
_DEPTH = 3
# Into how many sections the bytes that the model leaves for the backward pass are divided.
_PARTS = (4, 8, 16)
# TensorFlow's executor takes ops in another order each time, and each order has a peak of its own:
# two LSTMs hold 38 MiB in two of three steps, and 74 in the third. So many steps are counted, or as
# many as these seconds hold, but not fewer than the least: eight miss the third once in 25 times.
_STEPS, _STEPS_S, _LEAST_STEPS = 16, 4.0, 8
# Where steps differed, the next may differ by more: their range divided by this is left free.
_MARGIN = 4
# What the rows of a sample that may not fit are divided by.
_SHARE = 4


@dataclass
class Behaviour:
    """What an item did, in all its calls of one forward pass."""

    calls: int = 0
    seconds: float = 0.0
    # Asked for in its calls and held after them, its results excluded.
    left_bytes: int = 0
    # Per result of its last call.
    result_bytes: tuple[int, ...] = ()
    # Keras variables.
    changed: list[Any] = field(default_factory=list)
    repeatable: bool = True


class Probe:
    """What each part of a model does in a forward pass, which changes variables and attributes.

    The sample runs once eagerly under a tape, for seconds and bytes; and once symbolically in
    Keras' stateless scope, where its updates of variables show as such. What has any other effect
    (stateful random ops, variables of TensorFlow's own, losses added inside, attributes set,
    Python's or NumPy's random numbers) would not be the same when run again, and is not repeatable.
    Nor is what reads variables where Keras does not see it, as a tf.function of a layer does: when
    it runs again, they may be updated.

    device : whose allocator is watched. Where it does not count, and where there is none, results
        stand for what items leave.

    chains : all chains of the model, at any depth, per layer that they are right below
    behaviour : per item
    held : per item, bytes held when it has run, beyond what was there at the start
    """

    def __init__(self, model: Any, args: tuple[Any, ...], device: str | None = None) -> None:
        self.chains: dict[Any, list[Chain]] = {}
        layers = [model]
        while layers:
            layer = layers.pop()
            # A layer may be in a model twice.
            if layer not in self.chains:
                self.chains[layer] = chains_of(layer)
                inside = [item.operation for chain in self.chains[layer] for item in chain.items]
                layers += [layer for layer in inside if isinstance(layer, keras.layers.Layer)]
        self._all = [chain for chains in self.chains.values() for chain in chains]
        self.behaviour = {item: Behaviour() for chain in self._all for item in chain.items}
        self.held: dict[Item, int] = {}
        # Once before: kernels are loaded, and what a layer sets in its first call is set.
        model(*args, training=True)
        if device is not None and has_statistics(device):
            self._measure(model, args, device)
        else:
            self._by_results(model, args)
        self._trace(model, args)

    def left_bytes(self, chain: Chain, items: tuple[Item, ...]) -> int:
        """What neighbouring items leave, but for results that are needed after them."""
        if chain.functional is None:
            (item,) = items
            return self.behaviour[item].left_bytes
        # Not the sum of what each leaves: results between them are kept by neither if both rerun.
        first = chain.items.index(items[0])
        before = self.held[chain.items[first - 1]] if first else 0
        inside = {id(out) for item in items for out in item.node.outputs}
        leave = self.crossing_bytes(chain, items[-1], only=inside)
        return self.held[items[-1]] - before - leave

    def crossing_bytes(self, chain: Chain, last: Item, only: set[int] | None = None) -> int:
        """Bytes of what is made up to an item and needed after it."""
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

        # Two empty marks, and not one around the call: what is held is read at the end of a mark,
        # and it is what the call adds that counts.
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
        """Call, and note its seconds and the bytes of its results."""
        began = time.perf_counter()
        results = call()
        behaviour = self.behaviour[item]
        behaviour.seconds += time.perf_counter() - began
        behaviour.calls += 1
        behaviour.result_bytes = tuple(map(bytes_of, tensors_in(results)))
        return results

    def _by_results(self, model: Any, args: tuple[Any, ...]) -> None:
        """Take results for what items leave."""
        held = 0

        def around(item: Item, call: Callable[[], Any]) -> Any:
            nonlocal held
            results = self._called(item, call)
            size = sum(self.behaviour[item].result_bytes)
            self.behaviour[item].left_bytes += size
            # The results, and as much again that is left for the backward pass.
            held += 2 * size
            self.held[item] = held
            return results

        with watched(self._all, around):
            model(*args, training=True)

    def _trace(self, model: Any, args: tuple[Any, ...]) -> None:
        """Find out which items can be run again, and what they change."""
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
                # What is changed is known, and no weight: its gradient would be lost.
                all(key in variables and key not in weights for key in changed)
                and (len(scope.losses), _rng_state()) == before
                and _same(_attributes(item.operation), attributes)
                and not any(kernels.has_effect(op) or kernels.is_random(op) for op in ops)
                and all(id(v) in seen for op in ops for v in kernels.variables_read(op))
                # Not in the body of a loop, where a gradient of ours cannot read variables.
                and graph is top[-1]
                # Tensors inside of what cannot be opened would have no gradient.
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
    """Knows which variables of Keras were read in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.read: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        self.read[id(variable)] = variable
        return super().get_current_value(variable)


def _attributes(operation: Any) -> list[dict[str, Any]]:
    """Copies of the attributes of a layer and of those in it."""
    inside = operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []
    return [dict(layer.__dict__) for layer in inside]


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        left.keys() == right.keys() and all(left[key] is right[key] for key in left)
        for left, right in zip(one, other, strict=True)
    )


def _rng_state() -> tuple[Any, str]:
    # As text: in the state is an array, which `==` compares by element.
    legacy: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return random.getstate(), repr(legacy.get_state(legacy=False))


@dataclass(frozen=True)
class _Measured:
    peak_bytes: int
    peak_op: str


# No step was measured.
_NONE = _Measured(0, "")


@dataclass(eq=False)
class LayerStep:
    """A model whose chosen layers run again in the backward pass.

    plan : by measured steps
    sections : what runs again
    base_bytes : what counts besides what ops ask for: variables, the sample, the optimizer's state
    """

    plan: MeasuredPlan
    sections: tuple[Section, ...]
    base_bytes: int
    # It runs the model's own call, whatever they are.
    settings: Settings = field(default_factory=dict)
    # Its peak was counted with the blocks that no allocator's trace shows.
    counts_small_blocks = True

    @property
    def peak_op(self) -> str:
        return self.plan.peak_op

    def run(self, model: Any, own_call: Callable[..., Any], call: Call) -> Any:
        """Run a model's own call, with the chosen sections run again later."""
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
    """Choose the layers of a model that run again.

    model, sample, budget : the plain model and a real sample; it is run, and left as it was.
    resident_bytes : what counts besides the step: the optimizer's state.
    safely : the sample may not fit without a plan: synthetic values stand for it, what layers leave
        is measured on a quarter of its rows where that shows it, and no step is run in which
        nothing runs again. If no choice keeps the budget, the one with the smallest peak is taken.
        Where the device's allocator does not count, all of the finest cut runs again, unmeasured.

    Raises TraceError if the sample has no values, or the device's allocator does not count;
    `safely`, if nothing can be run again.
    Raises BudgetError if no choice of layers keeps the budget on the sample; not if `safely`.
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
    """Return values for a tf.TensorSpec: numbers drawn at random, zeros or True."""
    if not isinstance(leaf, tf.TensorSpec):
        return leaf
    if leaf.dtype.is_floating:
        return tf.random.stateless_normal(leaf.shape, (1, 2), dtype=leaf.dtype)
    return tf.cast(tf.fill(leaf.shape, leaf.dtype == tf.bool), leaf.dtype)


class _InSections:
    """A model whose `call` has the sections that are measured."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with run_in_sections(self.__dict__["_sn_memory_sections"], self):
            return super().call(*args, **kwargs)  # type: ignore[misc]


class _Search:
    """Looks for the layers to run again: probes once, then measures choices."""

    def __init__(self, model: Any, args: tuple[Any, ...], base_bytes: int, *, safely: bool) -> None:
        self.model, self.args, self.base_bytes, self.safely = model, args, base_bytes, safely
        self.device = main_device()
        self.twin = twin_of(model, _InSections)
        # Bytes of the sample for one of what was watched.
        self.scale = 1
        self.probe = self.of_few_rows() if safely else Probe(model, args, self.device)

    def of_few_rows(self) -> Probe:
        """Measure a quarter of the rows, or all where these leave blocks too small to be seen."""
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
        # Without `safely`, an allocator that does not count has ended in an error before.
        counts = not self.safely or has_statistics(self.device)
        baseline = _NONE if self.safely else self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        # First the cut whose peak is smallest when all of it runs again.
        if counts:
            sections, best = self.cut(baseline, budget_bytes)
        else:
            sections, best = self.divide(_DEPTH, _PARTS[-1]), _NONE
        if self.safely and not sections:
            if self.leaves_bytes(self.probe) or not counts:
                raise TraceError("none of its layers can be run again")
            # Whatever they leave is too small to be seen.
            best = self.measured([], 0)
        # Cuts were compared by two steps each; the one that is taken is held to the worst of many.
        if sections and not self.safely and best.peak_bytes <= budget_bytes:
            best = self.measured(sections)
        # Then as few of its sections as keep the budget.
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
        """Return the sections with the smallest peak when all run again, and that step."""
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
                # Against a budget of 0, which two steps are enough to exceed.
                step = self.measured(sections, 0)
                if best[1] is _NONE or step.peak_bytes < best[1].peak_bytes:
                    best = (sections, step)
        return best

    def divide(self, depth: int, parts: int) -> list[Section]:
        """Divide what can be run again, to a depth, into about so many sections."""
        stretches = list(self.stretches(self.model, depth))
        wanted = sum(self.probe.left_bytes(*stretch) for stretch in stretches) // parts
        return [section for stretch in stretches for section in self.divided(*stretch, wanted)]

    def stretches(self, layer: Any, depth: int) -> Iterator[tuple[Chain, tuple[Item, ...]]]:
        """Items in a row that can be run again; what cannot is opened, at any depth."""
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
        """Divide a stretch into sections that leave about so many bytes, where little crosses."""
        probe = self.probe
        ends, begin = [0], 0
        while chain.functional is not None and begin < len(items):
            left = {
                end: probe.left_bytes(chain, items[begin:end])
                for end in range(begin + 1, len(items))
            }
            # Of the ends near `wanted` the one where least crosses, and of these the last.
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
        """Measure steps of the sample with sections run again.

        The worst of two, if that is above the budget; else of many, and a margin for the next. What
        the model does by itself has none.
        """
        self.twin.__dict__["_sn_memory_sections"] = tuple(sections)
        step = model_step(self.twin).get_concrete_function(*self.args)
        base = self.base_bytes + small_bytes(step.graph, self.device)
        # The first call of a function folds constants, whose bytes are in no later step.
        step(*self.args)
        peaks, op = self.counted(step, 2)
        if budget_bytes is None or base + max(peaks) <= budget_bytes:
            more, op_of_more = self.counted(step, _STEPS - 2)
            op = op if max(peaks) > max(more) else op_of_more
            peaks += more
        margin = (max(peaks) - min(peaks)) // _MARGIN if sections else 0
        return _Measured(base + max(peaks) + margin, op)

    def counted(self, step: Any, count: int) -> tuple[list[int], str]:
        """Return the peaks of so many steps, of fewer if they are long, and the op of the worst."""
        with Allocations(self.device) as asked_for:
            began = time.perf_counter()
            for number in range(count):
                if number >= _LEAST_STEPS and time.perf_counter() - began > _STEPS_S:
                    break
                with tf.profiler.experimental.Trace(f"{MARK}{number}"):
                    step(*self.args)
        op = asked_for.holders[0].op if asked_for.holders else "the variables"
        return list(asked_for.scratch_bytes.values()), op
