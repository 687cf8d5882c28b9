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
from ..eager.trial import left_alone
from ..errors import TraceError
from ..model.allocations import MARK, Allocations
from ..model.compare import put_back
from ..model.memory import has_statistics
from ..model.variables import variables_of
from ..trace.model import model_step, twin_of
from ..trace.small_blocks import small_bytes
from .made_up import SHARE, fewer_rows, made_up
from .probe import Probe, bytes_of
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
    model, args
        The plain model and a real sample; it is run, and left as it was.
    budget
        As in `plan`.
    device
        Whose memory is planned.
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
        device: str,
        resident_bytes: int = 0,
        safely: bool = False,
    ) -> None:
        args = sample if isinstance(sample, tuple) else (sample,)
        if safely:
            args = tf.nest.map_structure(made_up, args)
        if any(isinstance(it, tf.TensorSpec) for it in tf.nest.flatten(args)):
            raise TraceError(
                "planning by layers runs the model, and the sample is a tf.TensorSpec. Pass a "
                "tensor, or change the model so that it can be traced."
            )
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        variables = variables_of(model)
        given = [*variables, *tf.nest.flatten(args)]
        self.base_bytes = resident_bytes + sum(bytes_of(it) for it in given)
        self.sections: tuple[Section, ...] = ()
        with put_back(variables), left_alone(model):
            search = _Search(self, model, args, device, safely=safely)
            self.plan = search.safe(int(budget)) if safely else search.plan(budget)

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

    def __init__(
        self,
        step: LayerStep,
        model: Any,
        args: tuple[Any, ...],
        device: str,
        *,
        safely: bool,
    ) -> None:
        self.step, self.args, self.device = step, args, device
        self.twin = twin_of(model, _InSections)
        self.twin.__dict__["_sn_memory_step"] = step
        self.model = model
        # Bytes of the sample for one of what was watched.
        self.scale = 1
        self.probe = self.of_few_rows() if safely else Probe(model, args, device)

    def plan(self, budget: float | str) -> MeasuredPlan:
        baseline = self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        units, best = self.cut(baseline, budget_bytes)
        if units and best.peak_bytes <= budget_bytes:
            best = self.measured(units)
        chosen, best = fewest_again(
            units,
            best,
            lambda again: self.measured(again, budget_bytes),
            budget_bytes=budget_bytes,
            baseline_bytes=baseline.peak_bytes,
            how="with layers run again",
        )
        self.step.sections = tuple(it.section for it in chosen)
        return measured_plan(
            units,
            chosen,
            best,
            baseline,
            budget_bytes=budget_bytes,
            baseline_seconds=self.seconds(),
        )

    def of_few_rows(self) -> Probe:
        """Watch a quarter of the rows, or all where those leave nothing to be seen."""
        args = fewer_rows(self.args)
        if args is not None:
            try:
                probe = Probe(self.model, args, self.device)
            except Exception as error:  # noqa: BLE001 - whatever it is, other rows are no sample
                log.info("a quarter of the rows is no sample: %s", error)
            else:
                if any(it.left_bytes > 0 for it in probe.behaviour.values()):
                    self.scale = SHARE
                    return probe
        return Probe(self.model, self.args, self.device)

    def safe(self, budget_bytes: int) -> MeasuredPlan:
        """Return a choice found without a step in which nothing runs again."""
        counts = has_statistics(self.device)
        if counts:
            units, best = self.cut(None, budget_bytes)
        else:
            stretches = list(self.stretches(self.model, _DEPTH))
            whole = sum(self.probe.left_bytes(*it) for it in stretches)
            units = [it for at in stretches for it in self.divided(*at, whole // _PARTS[-1])]
            best = _NONE
        if not units:
            if any(it.left_bytes > 0 for it in self.probe.behaviour.values()) or not counts:
                raise TraceError("none of its layers can be run again")
            # Whatever they leave is too small to be seen.
            best = self.measured([], 0)
        chosen = units
        if counts and best.peak_bytes <= budget_bytes:
            chosen, best = fewest_again(
                units,
                best,
                lambda again: self.measured(again, budget_bytes),
                budget_bytes=budget_bytes,
                # For the error of a budget that is too small; this one is kept.
                baseline_bytes=0,
                how="with layers run again",
            )
        self.step.sections = tuple(it.section for it in chosen)
        return measured_plan(
            units, chosen, best, _NONE, budget_bytes=budget_bytes, baseline_seconds=self.seconds()
        )

    def seconds(self) -> float:
        """Seconds of the forward pass, as watched."""
        return sum(
            self.probe.behaviour[it].seconds
            for chain in self.probe.chains[self.model]
            for it in chain.items
        )

    def cut(self, baseline: _Measured | None, budget_bytes: int) -> tuple[list[_Unit], _Measured]:
        """Return the units with the smallest peak when all run again, and that step."""
        best: tuple[list[_Unit], _Measured] = ([], baseline or _NONE)
        if baseline is not None and baseline.peak_bytes <= budget_bytes:
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
                found = self.measured(units, 0)
                if best[1] is _NONE or found.peak_bytes < best[1].peak_bytes:
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
            yield _Unit(section, self.scale * left, sum(it.seconds for it in found))

    def measured(self, units: Sequence[_Unit], budget_bytes: int | None = None) -> _Measured:
        """Count steps of the sample with units run again.

        The worst of two, if that is above the budget; else of many, and a margin for the next. What
        the model does by itself has none.
        """
        self.step.sections = tuple(it.section for it in units)
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
        with Allocations(self.device) as found:
            began = time.perf_counter()
            for place in range(count):
                if place >= _LEAST_STEPS and time.perf_counter() - began > _STEPS_S:
                    break
                with tf.profiler.experimental.Trace(f"{MARK}{place}"):
                    step(*self.args)
        op = found.holders[0].op if found.holders else "the variables"
        return list(found.scratch_bytes.values()), op
