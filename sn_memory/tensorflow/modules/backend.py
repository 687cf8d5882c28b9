"""The back end for models that cannot be traced: chosen layers run again in the backward pass.

The sample is run: seconds and bytes of each layer are measured, layers next to each other are taken
together, and each choice is counted by the allocator's trace of a step. So the budget is kept on
the sample, or refused. Keras' own RematScope does the running again only for layers that are called
without keyword arguments, chooses by size of the output, and nobody checks what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tensorflow as tf

from ...base.sizes import parse_bytes
from ...run.measured_choice import MeasuredPlan, fewest_again, measured_plan
from ..eager.trial import left_alone
from ..errors import TraceError
from ..model.allocations import Allocations
from ..model.compare import put_back
from ..trace.model import model_step, twin_of
from .probe import Probe
from .rerun import run_again
from .sections import Chain, Item, Section, run_in_sections

# Models in models are opened no further than this: deeper layers are mostly single ops.
_DEPTH = 3
# Into how many sections what the model leaves for the backward pass is divided.
_PARTS = (4, 8, 16)


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


class LayerStep:
    """A model whose chosen layers run again in the backward pass.

    Parameters
    ----------
    model, args
        The plain model and a real sample; it is run, and left as it was.
    budget
        As in `plan`.
    device
        Whose memory is planned.
    resident_bytes
        What counts beside the step: the optimizer's state.

    Raises
    ------
    TraceError
        If the sample has no memory, or the device's allocator does not count.
    BudgetError
        If no choice of layers keeps the budget on the sample.
    """

    def __init__(
        self,
        model: Any,
        sample: Any,
        budget: int | str,
        *,
        device: str,
        resident_bytes: int = 0,
    ) -> None:
        args = sample if isinstance(sample, tuple) else (sample,)
        if any(isinstance(it, tf.TensorSpec) for it in tf.nest.flatten(args)):
            raise TraceError(
                "planning by layers runs the model, and the sample is a tf.TensorSpec. Pass a "
                "tensor, or change the model so that it can be traced."
            )
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        given = [*model.variables, *tf.nest.flatten(args)]
        self.base_bytes = resident_bytes + sum(_bytes(it) for it in given)
        self.sections: tuple[Section, ...] = ()
        with put_back(model.variables), left_alone(model):
            search = _Search(self, model, args, device)
            self.plan = search.plan(budget)

    def run(self, model: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a model's own call, with the chosen sections run again later."""
        with run_in_sections(self.sections, _again, model):
            return call(*args, **kwargs)


def _again(section: Section, function: Any, given: list[Any]) -> list[Any]:
    return run_again(function, given, section.changed)


class _InSections:
    """A model whose `call` has its step's sections, for measuring."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        step: LayerStep = self.__dict__["_sn_memory_step"]
        return step.run(self, super().call, args, kwargs)  # type: ignore[misc]


class _Search:
    """Looks for the layers to run again: probes once, then measures choices."""

    def __init__(self, step: LayerStep, model: Any, args: tuple[Any, ...], device: str) -> None:
        self.step, self.args, self.device = step, args, device
        self.twin = twin_of(model, _InSections)
        self.twin.__dict__["_sn_memory_step"] = step
        self.probe = Probe(model, args, device)
        self.model = model

    def plan(self, budget: int | str) -> MeasuredPlan:
        baseline = self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        units, best = self.cut(baseline, budget_bytes)
        chosen, best = fewest_again(
            units,
            best,
            self.measured,
            budget_bytes=budget_bytes,
            baseline_bytes=baseline.peak_bytes,
            how="with layers run again",
        )
        self.step.sections = tuple(it.section for it in chosen)
        seconds = sum(
            self.probe.behaviour[it].seconds
            for chain in self.probe.chains[self.model]
            for it in chain.items
        )
        return measured_plan(
            units,
            chosen,
            best,
            baseline,
            budget_bytes=budget_bytes,
            baseline_seconds=seconds,
        )

    def cut(self, baseline: _Measured, budget_bytes: int) -> tuple[list[_Unit], _Measured]:
        """Return the units with the smallest peak when all run again, and that step."""
        best: tuple[list[_Unit], _Measured] = ([], baseline)
        if baseline.peak_bytes <= budget_bytes:
            return best
        seen: set[tuple[tuple[Item, ...], ...]] = set()
        for depth in range(1, _DEPTH + 1):
            stretches = list(self.stretches(self.model, depth))
            whole = sum(self.probe.left_bytes(*it) for it in stretches)
            for parts in _PARTS:
                units = [
                    unit
                    for chain, items in stretches
                    for unit in self.divided(chain, items, whole // parts)
                ]
                items = tuple(unit.section.items for unit in units)
                if not units or items in seen:
                    continue
                seen.add(items)
                found = self.measured(units)
                if found.peak_bytes < best[1].peak_bytes:
                    best = (units, found)
        return best

    def stretches(self, layer: Any, depth: int) -> Iterator[tuple[Chain, tuple[Item, ...]]]:
        """Items in a row that can be run again; what cannot is opened, as deep as there is."""
        for chain in self.probe.chains[layer]:
            row: list[Item] = []
            for item in chain.items:
                found = self.probe.behaviour[item]
                opened = self.probe.chains.get(item.operation, [])
                if found.calls and found.repeatable and not (opened and depth > 1):
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
            begin = min(near, key=lambda end: (self.crossing_bytes(chain, items, end), -end))
            ends.append(begin)
        if ends[-1] < len(items):
            ends.append(len(items))
        for one, other in pairwise(ends):
            yield from self.unit(chain, items[one:other])

    def crossing_bytes(self, chain: Chain, items: tuple[Item, ...], end: int) -> int:
        return self.probe.crossing_bytes(chain, chain.items.index(items[end - 1]))

    def unit(self, chain: Chain, items: tuple[Item, ...]) -> Iterator[_Unit]:
        """Return a unit, if it leaves anything."""
        found = [self.probe.behaviour[it] for it in items]
        changed = {id(it): it for mine in found for it in mine.changed}
        left = self.probe.left_bytes(chain, items)
        if left > 0:
            section = Section(chain, items, tuple(changed.values()))
            yield _Unit(section, left, sum(it.seconds for it in found))

    def measured(self, units: Sequence[_Unit]) -> _Measured:
        """Count a step of the sample with units run again; the worse of two steps."""
        self.step.sections = tuple(it.section for it in units)
        step = model_step(self.twin).get_concrete_function(*self.args)
        step(*self.args)
        peaks = []
        for _ in range(2):
            with Allocations(self.device) as found:
                step(*self.args)
            op = found.holders[0].op if found.holders else "the variables"
            peaks.append(_Measured(self.step.base_bytes + found.peak_bytes, op))
        return max(peaks, key=lambda it: it.peak_bytes)


def _bytes(value: Any) -> int:
    count = tf.TensorShape(value.shape).num_elements() or 0
    return int(count) * int(tf.as_dtype(value.dtype).size)
