"""The back end for models that cannot be traced: chosen layers run again in the backward pass.

The sample is run: seconds and bytes of each layer are measured, layers next to each other are taken
together, and each choice is counted by the allocator's trace of a step. So the budget is kept on
the sample, or refused. Keras' own RematScope does the running again only for layers that are called
without keyword arguments, chooses by size of the output, and nobody checks what comes of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tensorflow as tf

from ...base.sizes import parse_bytes
from ...run.measured_choice import MeasuredPlan, fewest_again, measured_plan
from ..errors import TraceError
from ..memory import MARK, Allocations, bytes_of, has_statistics, main_device
from ..model import model_step, put_back, restore_model, twin_of, variables_of
from ..trace.small_blocks import small_bytes
from .probe import Probe
from .rerun import run_again
from .sections import Chain, Item, Section, run_in_sections

log = logging.getLogger(__name__)

# Models in models are opened no further than this: deeper layers are mostly single ops.
_DEPTH = 3
# Into how many sections what the model leaves for the backward pass is divided.
_PARTS = (4, 8, 16)
# TensorFlow's executor takes ops in another order each time, and each order has a peak of its own:
# two LSTMs hold 38 MiB in two of three steps, and 74 in the third. So many steps are counted, or as
# many as these seconds hold, but not fewer than the least: eight miss the third once in 25 times.
_STEPS, _STEPS_S, _LEAST_STEPS = 16, 4.0, 8
# Where steps differed, the next may differ by more: such a part of that is left free.
_MARGIN = 4
# What the rows of a sample that may not fit are divided by.
_SHARE = 4


@dataclass(frozen=True)
class _Unit:
    section: Section
    saved_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        return self.section.name


@dataclass(frozen=True)
class _Measured:
    peak_bytes: int
    peak_op: str


# No step was measured.
_NONE = _Measured(0, "")


class LayerStep:
    """A model whose chosen layers run again in the backward pass.

    Parameters
    ----------
    model, sample
        The plain model and a real sample; it is run, and left as it was.
    budget
        As in `plan`.
    resident_bytes
        What counts beside the step: the optimizer's state.
    safely
        The sample may not fit without a plan: values are made up for it, what layers leave is
        watched on a quarter of its rows where they show it, and no step is run in which nothing
        runs again. If no choice keeps the budget, that with the smallest peak is taken. Where the
        device's allocator does not count, all of the finest cut runs again, unmeasured.

    Raises
    ------
    TraceError
        If the sample has no memory, or the device's allocator does not count; `safely`, if nothing
        can be run again.
    BudgetError
        If no choice of layers keeps the budget on the sample; not if `safely`.
    """

    def __init__(
        self,
        model: Any,
        sample: Any,
        budget: float | str,
        *,
        resident_bytes: int = 0,
        safely: bool = False,
    ) -> None:
        args = sample if isinstance(sample, tuple) else (sample,)
        if safely:
            args = tf.nest.map_structure(_synthetic, args)
        if any(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(args)):
            raise TraceError(
                "planning by layers runs the model, and the sample is a tf.TensorSpec. Pass a "
                "tensor, or change the model so that it can be traced."
            )
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        variables = variables_of(model)
        self.base_bytes = resident_bytes + sum(map(bytes_of, (*variables, *tf.nest.flatten(args))))
        self.sections: tuple[Section, ...] = ()
        with put_back(variables), restore_model(model):
            self.plan = _Search(self, model, args, safely=safely).plan(budget)

    def run(self, model: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a model's own call, with the chosen sections run again later."""
        with run_in_sections(self.sections, _rerun, model):
            return call(*args, **kwargs)


def _rerun(section: Section, function: Any, given: list[Any]) -> list[Any]:
    return run_again(function, given, section.changed)


def _synthetic(leaf: Any) -> Any:
    """Return values for a tf.TensorSpec: numbers drawn at random, zeros or True."""
    if not isinstance(leaf, tf.TensorSpec):
        return leaf
    if leaf.dtype.is_floating:
        return tf.random.stateless_normal(leaf.shape, (1, 2), dtype=leaf.dtype)
    return tf.cast(tf.fill(leaf.shape, leaf.dtype == tf.bool), leaf.dtype)


class _InSections:
    """A model whose `call` has its step's sections, for measuring."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step: LayerStep = self.__dict__["_sn_memory_step"]
        return step.run(self, super().call, args, kwargs)  # type: ignore[misc]


class _Search:
    """Looks for the layers to run again: probes once, then measures choices."""

    def __init__(self, step: LayerStep, model: Any, args: tuple[Any, ...], *, safely: bool) -> None:
        self.step, self.model, self.args, self.safely = step, model, args, safely
        self.device = main_device()
        self.twin = twin_of(model, _InSections)
        self.twin.__dict__["_sn_memory_step"] = step
        # Bytes of the sample for one of what was watched.
        self.scale = 1
        self.probe = self.of_few_rows() if safely else Probe(model, args, self.device)

    def of_few_rows(self) -> Probe:
        """Watch a quarter of the rows, or all where those leave nothing to be seen."""
        rows = {it.shape[0] if it.shape.rank else 0 for it in tf.nest.flatten(self.args)}
        count = rows.pop() // _SHARE if len(rows) == 1 else 0
        if count:
            few = tf.nest.map_structure(lambda it: it[:count], self.args)
            try:
                probe = Probe(self.model, few, self.device)
            except Exception as error:  # noqa: BLE001 - whatever it is, other rows are no sample
                log.info("a quarter of the rows is no sample: %s", error)
            else:
                if self.leaves_bytes(probe):
                    self.scale = _SHARE
                    return probe
        return Probe(self.model, self.args, self.device)

    @staticmethod
    def leaves_bytes(probe: Probe) -> bool:
        return any(behaviour.left_bytes > 0 for behaviour in probe.behaviour.values())

    def plan(self, budget: float | str) -> MeasuredPlan:
        counts = not self.safely or has_statistics(self.device)
        baseline = _NONE if self.safely else self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        if counts:
            units, best = self.cut(baseline, budget_bytes)
        else:
            units, best = self.divide(_DEPTH, _PARTS[-1]), _NONE
        if self.safely and not units:
            if self.leaves_bytes(self.probe) or not counts:
                raise TraceError("none of its layers can be run again")
            # Whatever they leave is too small to be seen.
            best = self.measured([], 0)
        if units and not self.safely and best.peak_bytes <= budget_bytes:
            best = self.measured(units)
        chosen = units
        if not self.safely or (counts and best.peak_bytes <= budget_bytes):
            chosen, best = fewest_again(
                units,
                best,
                lambda again: self.measured(again, budget_bytes),
                budget_bytes=budget_bytes,
                baseline_bytes=baseline.peak_bytes,
                how="with layers run again",
            )
        self.step.sections = tuple(unit.section for unit in chosen)
        forward_s = sum(
            self.probe.behaviour[item].seconds
            for chain in self.probe.chains[self.model]
            for item in chain.items
        )
        return measured_plan(
            units, chosen, best, baseline, budget_bytes=budget_bytes, baseline_seconds=forward_s
        )

    def cut(self, baseline: _Measured, budget_bytes: int) -> tuple[list[_Unit], _Measured]:
        """Return the units with the smallest peak when all run again, and that step."""
        best: tuple[list[_Unit], _Measured] = ([], baseline)
        if baseline is not _NONE and baseline.peak_bytes <= budget_bytes:
            return best
        seen: set[tuple[tuple[Item, ...], ...]] = set()
        for depth in range(1, _DEPTH + 1):
            for parts in _PARTS:
                units = self.divide(depth, parts)
                items = tuple(unit.section.items for unit in units)
                if not units or items in seen:
                    continue
                seen.add(items)
                step = self.measured(units, 0)
                if best[1] is _NONE or step.peak_bytes < best[1].peak_bytes:
                    best = (units, step)
        return best

    def divide(self, depth: int, parts: int) -> list[_Unit]:
        """Divide what can be run again, to a depth, into about so many units."""
        stretches = list(self.stretches(self.model, depth))
        wanted = sum(self.probe.left_bytes(*stretch) for stretch in stretches) // parts
        return [unit for stretch in stretches for unit in self.divided(*stretch, wanted)]

    def stretches(self, layer: Any, depth: int) -> Iterator[tuple[Chain, tuple[Item, ...]]]:
        """Items in a row that can be run again; what cannot is opened, as deep as there is."""
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

    def divided(self, chain: Chain, items: tuple[Item, ...], wanted: int) -> Iterator[_Unit]:
        """Divide a stretch into units that leave about so many bytes, where little crosses."""
        ends, begin = [0], 0
        while chain.functional is not None and begin < len(items):
            left = {
                end: self.probe.left_bytes(chain, items[begin:end])
                for end in range(begin + 1, len(items))
            }
            near = [end for end, size in left.items() if 0.5 * wanted <= size <= 1.5 * wanted]
            if not near:
                near = [next((end for end, size in left.items() if size >= wanted), len(items))]
            begin = min(near, key=lambda end: (self.crossing_bytes(chain, items[end - 1]), -end))
            ends.append(begin)
        if ends[-1] < len(items):
            ends.append(len(items))
        for one, other in pairwise(ends):
            yield from self.unit(chain, items[one:other])

    def crossing_bytes(self, chain: Chain, item: Item) -> int:
        return self.probe.crossing_bytes(chain, chain.items.index(item))

    def unit(self, chain: Chain, items: tuple[Item, ...]) -> Iterator[_Unit]:
        """Return a unit, if it leaves anything."""
        behaviours = [self.probe.behaviour[item] for item in items]
        changed = {id(it): it for behaviour in behaviours for it in behaviour.changed}
        left = self.probe.left_bytes(chain, items)
        if left > 0:
            section = Section(chain, items, tuple(changed.values()))
            yield _Unit(section, self.scale * left, sum(it.seconds for it in behaviours))

    def measured(self, units: Sequence[_Unit], budget_bytes: int | None = None) -> _Measured:
        """Count steps of the sample with units run again.

        The worst of two, if that is above the budget; else of many, and a margin for the next. What
        the model does by itself has none.
        """
        self.step.sections = tuple(unit.section for unit in units)
        step = model_step(self.twin).get_concrete_function(*self.args)
        base = self.step.base_bytes + small_bytes(step.graph, self.device)
        step(*self.args)
        peaks, op = self.counted(step, 2)
        if budget_bytes is None or base + max(peaks) <= budget_bytes:
            more, op_of_more = self.counted(step, _STEPS - 2)
            op = op if max(peaks) > max(more) else op_of_more
            peaks += more
        margin = (max(peaks) - min(peaks)) // _MARGIN if units else 0
        return _Measured(base + max(peaks) + margin, op)

    def counted(self, step: Any, count: int) -> tuple[list[int], str]:
        """Return the peaks of so many steps, of fewer if they are long, and the op of the worst."""
        with Allocations(self.device) as asked_for:
            began = time.perf_counter()
            for place in range(count):
                if place >= _LEAST_STEPS and time.perf_counter() - began > _STEPS_S:
                    break
                with tf.profiler.experimental.Trace(f"{MARK}{place}"):
                    step(*self.args)
        op = asked_for.holders[0].op if asked_for.holders else "the variables"
        return list(asked_for.scratch_bytes.values()), op
