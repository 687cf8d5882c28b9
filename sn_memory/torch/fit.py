"""The largest batch that fits a device of the table, for each way to train, and its speed.

Plain steps are run without values at each batch that is tried. Plans are made on the graph of the
step at that batch, which follows from two traces (`run/estimate.py`). Nothing is measured.

With all of the state on the host, and with the parameters there as well, the host computes updates
in parallel to the device (ZeRO-Offload, Ren et al. 2021), or the device does with state that is
copied there and back, whichever ends first. That is predicted, and was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..base.errors import GraphError, PlanError
from ..base.progress import report_progress
from ..check import check_plan
from ..cost.devices import named
from ..graph.graph import Graph
from ..graph.hosted import Unit
from ..plan.api import plan_graph
from ..plan.plan import BudgetError, Plan
from ..plan.state import StatePlan, planned_with
from ..run.estimate import (
    PLAIN,
    Batches,
    Estimate,
    Fit,
    Held,
    Units,
    Way,
    categories,
    largest,
    on_cards,
)
from .errors import TraceError
from .estimate import estimate
from .state.optimizer import StateUnits
from .target.capacity import units_of
from .target.gpu import Gpu
from .trace.fake_step import fake_step_on
from .trace.trace import Trace, call_arguments, trace

P = TypeVar("P", Plan, StatePlan)
# Takes a batch size and a length (None: the sample's own); returns a model and its sample.
Make = Callable[[int, int | None], tuple[torch.nn.Module, Any]]
_PLACES = {"state": "state on the host", "host": "parameters and state on the host"}
# Memory bandwidth of a server with eight channels or more. An assumption, which the result states.
HOST_BYTES_PER_S = 100e9
# Sizes are linear in the batch, so two traces suffice for all batches (decision 64).
_TRACED = (2, 4)
_EXCHANGE = "the exchange between cards is counted as no time, so seconds are a lower bound"
_TOO_LARGE = "the least batch is too large"
_NO_PLAN = "no plan fits in that time"
_ALLOCATED = (
    "plain fits by what torch's allocator reserves; plans and cards by what is allocated, to which "
    "it may add some per cent"
)


def fit(
    make: Make,
    device: str,
    *,
    optimizer: Any = None,
    batches: tuple[int, int] = (1, 512),
    length: int | None = None,
    cards: Sequence[int] = (1,),
    extra: Sequence[float] = (0.05, 0.10, 0.20),
    amp: torch.dtype | None = None,
    time_limit_s: float = 5.0,
    state: bool = False,
    host_bytes_per_s: float = HOST_BYTES_PER_S,
) -> Fit:
    """Return the largest batch that fits a device, for each way to train, with seconds and bytes.

    Parameters
    ----------
    make
        Called with a batch size and the length; returns a model and its sample, on the meta device
        if they are large.
    device
        A name of the table.
    optimizer
        A class whose only required argument is the parameters, e.g. torch.optim.AdamW.
    batches
        The smallest and the largest batch to try.
    length
        Sequence length, passed to `make`; if given, tokens are counted.
    cards
        Numbers of cards for FSDP2.
    extra
        How much longer a planned step may take, as shares of the plain step's time.
    amp
        The dtype of autocast; None for none.
    time_limit_s
        For the search of each plan.
    state
        Whether to also plan with the optimizer's state, and parameters, on the host.
    host_bytes_per_s
        Bandwidth of the host's memory, for updates computed by the host.

    Raises
    ------
    TraceError
        For a model whose step cannot be run without values.
    """
    question = _Question(make, named(device).name, optimizer, length, amp, time_limit_s, batches)
    host = host_bytes_per_s if state else None
    return question.answer(sorted({card for card in cards if card > 1}), extra, host)


@dataclass
class _Question:
    """A model, a device and a range of batches, with the results computed so far."""

    make: Make
    device: str
    optimizer: Any
    length: int | None
    amp: torch.dtype | None
    time_limit_s: float
    batches: tuple[int, int]

    def __post_init__(self) -> None:
        self.room = named(self.device).usable_bytes
        self._estimates: dict[int, Estimate] = {}
        self._rests: dict[int, int] = {}
        # Per kind of plan and batch; shared by rows that differ only in the time they may take.
        self._plans: dict[tuple[str, int], Any] = {}
        # The graph of the step at any batch, once it is traced.
        self._graphs: Batches | None = None

    def answer(
        self, cards: Sequence[int], extra: Sequence[float], host_bytes_per_s: float | None
    ) -> Fit:
        least, most = self.batches
        # The time share for ways that are planned for one share only: with offload, and with state.
        middle = sorted(extra)[len(extra) // 2] if extra else 0.10
        self._report_progress(PLAIN)
        plain = largest(self.fits, least, most)
        ways = [self.plain(plain)]
        notes = [_ALLOCATED, *self.at(plain or least).notes]
        try:
            steps = self._steps(self.optimizer)
            self._graphs = Batches(*((batch, step.graph) for batch, _, step in steps))
        except (TraceError, GraphError) as error:
            notes.append(f"no plan was made: {error}")
        if self._graphs is not None:
            options = [(share, False) for share in extra] + ([(middle, True)] if extra else [])
            ways += [self.planned(self._graphs, plain, *option) for option in options]
            if host_bytes_per_s is not None:
                ways += self.on_host(host_bytes_per_s, middle)
        units = units_of(self.make(least, self.length)[0])
        ways += [self.on_cards(count, units) for count in cards]
        if cards:
            notes.append(_EXCHANGE)
        return Fit(self.device, self.room, self.length, most, tuple(ways), tuple(notes))

    def at(self, batch: int) -> Estimate:
        """Return the estimate at a batch."""
        if batch not in self._estimates:
            with self._casting():
                self._estimates[batch] = estimate(
                    *self.make(batch, self.length), optimizer=self.optimizer, device=self.device
                )
        return self._estimates[batch]

    def fits(self, batch: int) -> bool:
        """Whether a plain step fits, by the bytes that torch's allocator would reserve."""
        estimate = self.at(batch)
        return max(estimate.peak_bytes, estimate.reserved_bytes) <= self.room

    def plain(self, batch: int) -> Way:
        if not batch:
            short = self.at(next(iter(self._estimates)))
            return Way(PLAIN, 0, allocated_bytes=short.peak_bytes, note=_TOO_LARGE)
        estimate = self.at(batch)
        return self._way(
            PLAIN,
            batch,
            estimate.seconds,
            allocated_bytes=estimate.peak_bytes,
            reserved_bytes=estimate.reserved_bytes,
            pinned_bytes=0,
            bytes=categories(estimate),
        )

    def planned(self, graphs: Batches, plain: int, share: float, offload: bool) -> Way:
        name = f"plan, +{_percent(share)} time{', offload' if offload else ''}"
        techniques = ("keep", "recompute", "offload") if offload else ("keep", "recompute")

        def planned(batch: int) -> Plan | None:
            with suppress(BudgetError):
                return self._plan(graphs.at(batch), self.room, techniques)
            return None

        def quick(plan: Plan) -> bool:
            return plan.overhead <= share

        # Begin at the batch that fits without a plan: a plan that keeps everything fits there, too.
        batch, plan = self._largest(name, str(techniques), planned, quick, plain)
        if plan is None:
            return Way(name, 0, note=_NO_PLAN)
        return self._way(
            name,
            batch,
            plan.seconds + self._update_s(),
            allocated_bytes=plan.peak_bytes,
            pinned_bytes=check_plan(graphs.at(batch), plan).host_peak_bytes,
        )

    def on_host(self, host_bytes_per_s: float, share: float) -> list[Way]:
        """Return the ways with state on the host; raise PlanError if the optimizer has none."""
        if self.optimizer is None:
            raise PlanError(
                "state on the host needs the optimizer whose state it is: pass its name."
            )
        # Traced without the optimizer: its state is part of the plan, and would count twice.
        (few, _, small), (many, model, large) = self._steps(None)
        graphs = Batches((few, small.graph), (many, large.graph))
        units = StateUnits(self.optimizer(model.parameters())).of(model, large, host_bytes_per_s)
        return [
            self._with_state(graphs, units, place, share, host_bytes_per_s) for place in _PLACES
        ]

    def _with_state(
        self, graphs: Batches, units: Sequence[Unit], place: str, share: float, rate: float
    ) -> Way:
        name = _PLACES[place]
        places = {unit.parameter: place for unit in units if _moves(unit, place)}

        def planned(batch: int) -> StatePlan | None:
            """Return the faster plan, of updates by the host and by the device."""
            graph, plans = graphs.at(batch), []
            for by in ("host", "device"):
                updaters = dict.fromkeys(places, by)
                with suppress(BudgetError):
                    plans.append(
                        planned_with(graph, units, places, self.room, self._plan, updaters=updaters)
                    )
            return min(plans, key=lambda plan: plan.lanes.seconds, default=None)

        def quick(plan: StatePlan) -> bool:
            return plan.plan.overhead <= share

        batch, plan = self._largest(name, place, planned, quick)
        if plan is None:
            return Way(name, 0, note=_NO_PLAN)
        by_host = sum(updater == "host" for updater in plan.updaters.values())
        # Parameters do not grow with the batch.
        sizes = {storage.name: storage.bytes for storage in graphs.at(1).storages}
        return self._way(
            name,
            batch,
            plan.lanes.seconds,
            allocated_bytes=plan.plan.peak_bytes,
            pinned_bytes=host_bytes(plan, units, sizes),
            note=f"{by_host} of {len(plan.updaters)} parameters are updated by the host, whose "
            f"memory is taken to move {rate / 1e9:g} GB/s; {_percent(plan.lanes.hidden)} of copies "
            "and its updates overlap with ops",
        )

    def on_cards(self, count: int, units: Units) -> Way:
        name = f"{count} cards, FSDP2"
        self._report_progress(f"{count} cards")

        def held(batch: int) -> Held:
            # Parameters, gradients and state are the same at any batch: take one already tried.
            estimate = self.at(min(self._estimates))
            return on_cards(
                count,
                parameters_bytes=estimate.parameters_bytes,
                gradients_bytes=estimate.gradients_bytes,
                optimizer_bytes=estimate.optimizer_bytes,
                rest_bytes=self.rest(batch) + estimate.workspace_bytes,
                units=units,
            )

        batch = largest(lambda batch: held(batch).peak_bytes <= self.room, *self.batches)
        if not batch:
            return Way(name, 0, count, note=_TOO_LARGE)
        estimate = held(batch)
        return self._way(
            name,
            batch,
            self._step_s(batch, count),
            count,
            allocated_bytes=estimate.peak_bytes,
            pinned_bytes=0,
            bytes={
                "parameters": estimate.parameters_bytes,
                "gradients": estimate.gradients_bytes,
                "optimizer": estimate.optimizer_bytes,
                "gathered": estimate.gathered_bytes,
                "all else at its peak": estimate.rest_bytes,
            },
        )

    def rest(self, batch: int) -> int:
        """Bytes at the peak of a step, without parameters, gradients and optimizer state."""
        if batch not in self._rests:
            model, sample = self.make(batch, self.length)
            with self._casting():
                gpu = Gpu(named(self.device))
                # Without gradients of parameters, which `on_cards` counts.
                step = fake_step_on(gpu, model, call_arguments(sample), keep=False)
            own = self.at(min(self._estimates)).parameters_bytes
            self._rests[batch] = step.peak_bytes - own
        return self._rests[batch]

    def _largest(
        self,
        name: str,
        kind: str,
        planned: Callable[[int], P | None],
        quick: Callable[[P], bool],
        start: int = 0,
    ) -> tuple[int, P | None]:
        """Return the largest batch that has a fast enough plan, and that plan."""
        self._report_progress(name)

        def plan(batch: int) -> P | None:
            if (kind, batch) not in self._plans:
                self._plans[kind, batch] = planned(batch)
            known: P | None = self._plans[kind, batch]
            return known

        def fits(batch: int) -> bool:
            option = plan(batch)
            return option is not None and quick(option)

        batch = largest(fits, *self.batches, start)
        return batch, plan(batch) if batch else None

    def _plan(
        self, graph: Graph, budget_bytes: int, techniques: Sequence[str] = ("keep", "recompute")
    ) -> Plan:
        return plan_graph(
            graph,
            budget_bytes,
            techniques=techniques,
            time_limit_s=self.time_limit_s,
            from_sqrt_n=False,
        )

    def _steps(self, optimizer: Any) -> Iterator[tuple[int, torch.nn.Module, Trace]]:
        """Trace the step at two batches, with this optimizer's state."""
        for batch in _TRACED:
            self._report_progress(f"trace, batch {batch}")
            model, sample = self.make(batch, self.length)
            with self._casting():
                yield batch, model, trace(model, sample, device=self.device, optimizer=optimizer)

    def _update_s(self) -> float:
        """Seconds of the optimizer's step: the estimated step's seconds beyond its graph."""
        estimate = self.at(max(self._estimates))
        # It reads weights, gradients and state, and writes weights and state.
        moved = 2 * (estimate.parameters_bytes + estimate.optimizer_bytes)
        moved += estimate.gradients_bytes
        rate = named(self.device).device().bytes_per_s
        return moved / rate if rate and estimate.optimizer_bytes else 0.0

    def _step_s(self, batch: int, count: int) -> float | None:
        if self._graphs is None:
            return None
        ways = self._graphs.at(batch).arrays.seconds
        # Each card updates its own shard only.
        return sum(way[0] for way in ways) + self._update_s() / count

    def _way(
        self, name: str, batch: int, seconds: float | None, cards: int = 1, **held: Any
    ) -> Way:
        if seconds:
            held["samples_per_s"] = batch * cards / seconds
            if self.length is not None:
                held["tokens_per_s"] = held["samples_per_s"] * self.length
        return Way(name, batch, cards, seconds, **held)

    def _casting(self) -> AbstractContextManager[Any]:
        # As `estimate` needs it: autocast for "cuda" is disabled where there is no GPU.
        return nullcontext() if self.amp is None else torch.autocast("cpu", self.amp)

    def _report_progress(self, what: str) -> None:
        of = "" if self.length is None else f"sequence {self.length}: "
        report_progress("fit", 0, 1, f"{of}{what}")


def host_bytes(plan: StatePlan, units: Iterable[Unit], sizes: Mapping[str, int]) -> int:
    """Return the bytes that the plan of a step with its updates holds on the host.

    For a parameter that the host updates, gradient and parameter are there as well.

    sizes : of the parameters, by name
    """
    total = 0
    for unit in units:
        place = plan.places[unit.parameter]
        if place != "device":
            by_host = plan.updaters.get(unit.parameter) == "host"
            copies = (place == "host" or by_host) + by_host
            total += unit.state_bytes + copies * sizes[unit.parameter]
    return total


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _moves(unit: Unit, place: str) -> bool:
    return unit.movable and (
        place == "host" or (unit.gradient is not None and unit.state_bytes > 0)
    )
