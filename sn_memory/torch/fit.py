"""How large a batch fits a device of the table, in each way to train, and how fast it would be.

Plain steps are run without values at each batch that is looked at. Plans are made on the graph of
the step at that batch, which follows from two traces (`run/estimate.py`). Nothing is measured.

With all of the state on the host, and with the parameters there as well, the host makes the updates
beside the device (ZeRO-Offload, Ren et al. 2021), or the device does with state that is brought and
sent back, whichever ends first. That is predicted, and was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..base.errors import GraphError, PlanError
from ..base.progress import report_progress
from ..check import check_plan
from ..cost.devices import named
from ..graph.graph import Graph
from ..graph.hosted import Unit
from ..plan.api import plan_graph
from ..plan.plan import BudgetError, Plan
from ..plan.state import Planner, StatePlan, planned_with
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

# Of a batch and a length (None: the sample's own), a model and its sample.
Make = Callable[[int, int | None], tuple[torch.nn.Module, Any]]
NAMES = {"state": "state on the host", "host": "parameters and state on the host"}
# Of a server: eight channels or more. An assumption, which the answer states.
HOST_BYTES_PER_S = 100e9
# Sizes are a straight line in the batch, so two traces do for all of them (decision 64).
_TRACED = (2, 4)
_EXCHANGE = "the exchange between cards is counted as no time, so seconds are a lower bound"
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
    """Return the largest batch of each way to train that fits a device, with seconds and bytes.

    Parameters
    ----------
    make
        Called with a batch and the length; returns a model and its sample, on the meta device if
        they are large.
    device
        A name of the table.
    optimizer
        A class that takes parameters alone, as torch.optim.AdamW.
    batches
        The least and the most to look at.
    length
        Of the sequence, handed to `make`; tokens are counted if it is given.
    cards
        Numbers of cards for FSDP2.
    extra
        Shares of a step's time that a plan may take more.
    amp
        The type of autocast; None for none.
    time_limit_s
        For the search of each plan.
    state
        Whether to plan with the optimizer's state, and parameters, on the host as well.
    host_bytes_per_s
        What the host's memory moves, for updates that the host makes.

    Raises
    ------
    TraceError
        For a model whose step cannot be told without values.
    """
    asked = _Asked(make, named(device).name, optimizer, length, amp, time_limit_s)
    host = host_bytes_per_s if state else None
    return asked.answer(batches, sorted({card for card in cards if card > 1}), extra, host)


class _Asked:
    """One question, and what was found out for it by now."""

    def __init__(
        self,
        make: Make,
        device: str,
        optimizer: Any,
        length: int | None,
        amp: torch.dtype | None,
        time_limit_s: float,
    ) -> None:
        self.make, self.device, self.optimizer = make, device, optimizer
        self.length, self.amp, self.time_limit_s = length, amp, time_limit_s
        self.room = named(device).usable_bytes
        self._estimates: dict[int, Estimate] = {}
        self._plans: dict[tuple[int, bool], Plan | None] = {}
        self._rests: dict[int, int] = {}
        self._batches: Batches | None = None

    def answer(
        self,
        batches: tuple[int, int],
        cards: Sequence[int],
        extra: Sequence[float],
        host_bytes_per_s: float | None = None,
    ) -> Fit:
        least, most = batches
        middle = sorted(extra)[len(extra) // 2] if extra else 0.10
        self._say("plain")
        plain = largest(self.fits, least, most)
        ways = [self.plain(plain)]
        notes = [_ALLOCATED, *self.at(plain or least).notes]
        try:
            self._batches = self._traced()
        except (TraceError, GraphError) as error:
            notes.append(f"no plan was made: {error}")
        if self._batches is not None:
            ways += [self.planned(share, plain, batches, offload=False) for share in extra]
            if extra:
                ways.append(self.planned(middle, plain, batches, offload=True))
        if host_bytes_per_s is not None and self._batches is not None:
            on_host = self.on_host(host_bytes_per_s)
            ways += on_host.ways(middle, batches, self._rates, self._say)
        units = units_of(self.make(least, self.length)[0])
        for count in cards:
            self._say(f"{count} cards")
            ways.append(self.on(count, units, batches))
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
        """Whether a plain step fits, by what torch's allocator would reserve for it."""
        estimate = self.at(batch)
        return max(estimate.peak_bytes, estimate.reserved_bytes) <= self.room

    def plain(self, batch: int) -> Way:
        if not batch:
            short = self.at(next(iter(self._estimates)))
            return Way(
                PLAIN, 0, allocated_bytes=short.peak_bytes, note="the least batch is too large"
            )
        estimate = self.at(batch)
        seconds = estimate.seconds
        return Way(
            PLAIN,
            batch,
            seconds=seconds,
            **self._rates(batch, seconds),
            allocated_bytes=estimate.peak_bytes,
            reserved_bytes=estimate.reserved_bytes,
            pinned_bytes=0,
            bytes=categories(estimate),
        )

    def planned(self, share: float, plain: int, batches: tuple[int, int], *, offload: bool) -> Way:
        least, most = batches
        name = f"plan, +{share:.0%} time".replace("%", " %")
        name += ", offload" if offload else ""
        self._say(name)

        def fits(batch: int) -> bool:
            plan = self.plan(batch, offload)
            return plan is not None and plan.overhead <= share

        # What fits as it is fits with a plan that does nothing.
        batch = largest(fits, least, most, plain)
        plan = self.plan(batch, offload) if batch else None
        if plan is None:
            return Way(name, 0, note="no plan fits in that time")
        assert self._batches is not None
        seconds = plan.seconds + self._update_s()
        host = check_plan(self._batches.at(batch), plan).host_peak_bytes
        return Way(
            name,
            batch,
            seconds=seconds,
            **self._rates(batch, seconds),
            allocated_bytes=plan.peak_bytes,
            pinned_bytes=host,
        )

    def plan(self, batch: int, offload: bool) -> Plan | None:
        """Return a plan at a batch within the room; None if there is none."""
        key = batch, offload
        if key not in self._plans:
            assert self._batches is not None
            techniques = ("keep", "recompute", "offload") if offload else ("keep", "recompute")
            try:
                self._plans[key] = self.search(self._batches.at(batch), self.room, techniques)
            except BudgetError:
                self._plans[key] = None
        return self._plans[key]

    def search(
        self, graph: Graph, budget_bytes: int, techniques: Sequence[str] = ("keep", "recompute")
    ) -> Plan:
        return plan_graph(
            graph,
            budget_bytes,
            techniques=techniques,
            time_limit_s=self.time_limit_s,
            from_sqrt_n=False,
        )

    def on(self, count: int, units: Units, batches: tuple[int, int]) -> Way:
        name = f"{count} cards, FSDP2"

        def held(batch: int) -> Held:
            # Parameters, gradients and state are the same at any batch.
            estimate = self.at(min(self._estimates))
            return on_cards(
                count,
                parameters_bytes=estimate.parameters_bytes,
                gradients_bytes=estimate.gradients_bytes,
                optimizer_bytes=estimate.optimizer_bytes,
                rest_bytes=self.rest(batch) + estimate.workspace_bytes,
                units=units,
            )

        batch = largest(lambda batch: held(batch).peak_bytes <= self.room, *batches)
        if not batch:
            return Way(name, 0, count, note="the least batch is too large")
        estimate = held(batch)
        seconds = self._step_s(batch, count)
        return Way(
            name,
            batch,
            count,
            seconds=seconds,
            **self._rates(batch, seconds, count),
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
        """Bytes at the highest moment of a step beside parameters, gradients and optimizer."""
        if batch not in self._rests:
            model, sample = self.make(batch, self.length)
            with self._casting():
                gpu = Gpu(named(self.device))
                step = fake_step_on(gpu, model, call_arguments(sample), keep=False)
            own = self.at(min(self._estimates)).parameters_bytes
            self._rests[batch] = step.peak_bytes - own
        return self._rests[batch]

    def on_host(self, host_bytes_per_s: float) -> OnHost:
        traced, rate = list(self._steps(None)), host_bytes_per_s
        return OnHost(
            self.optimizer, traced, room_bytes=self.room, planner=self.search, host_bytes_per_s=rate
        )

    def _traced(self) -> Batches:
        return Batches(*((batch, it.graph) for batch, _, it in self._steps(self.optimizer)))

    def _steps(self, optimizer: Any) -> Iterator[tuple[int, torch.nn.Module, Trace]]:
        """Trace the step at two batches, with this optimizer's state."""
        for batch in _TRACED:
            self._say(f"trace, batch {batch}")
            model, sample = self.make(batch, self.length)
            with self._casting():
                yield batch, model, trace(model, sample, device=self.device, optimizer=optimizer)

    def _update_s(self) -> float:
        """Seconds of the optimizer's step: those of a whole step beyond its graph."""
        estimate = self.at(max(self._estimates))
        moved = (
            2 * (estimate.parameters_bytes + estimate.optimizer_bytes) + estimate.gradients_bytes
        )
        rate = named(self.device).device().bytes_per_s
        return moved / rate if rate and estimate.optimizer_bytes else 0.0

    def _step_s(self, batch: int, count: int) -> float | None:
        if self._batches is None:
            return None
        ways = self._batches.at(batch).arrays.seconds
        # Each card updates its own shard only.
        return sum(way[0] for way in ways) + self._update_s() / count

    def _rates(self, batch: int, seconds: float | None, cards: int = 1) -> dict[str, Any]:
        if not seconds:
            return {}
        samples = batch * cards / seconds
        tokens = None if self.length is None else samples * self.length
        return {"samples_per_s": samples, "tokens_per_s": tokens}

    @contextmanager
    def _casting(self) -> Iterator[None]:
        with torch.autocast("cpu", self.amp) if self.amp is not None else nullcontext():
            yield

    def _say(self, what: str) -> None:
        of = "" if self.length is None else f"sequence {self.length}: "
        report_progress("fit", 0, 1, f"{of}{what}")


class OnHost:
    """The ways to train with state on the host.

    make_optimizer : a class that takes parameters alone
    traced : the step without an optimizer: a batch, the model, its trace; of two batches
    room_bytes : of the device
    planner : plans a graph within so many bytes
    host_bytes_per_s : what the host's memory moves

    Raises
    ------
    PlanError
        If the optimizer does not update parameter by parameter.
    """

    def __init__(
        self,
        make_optimizer: Any,
        traced: Sequence[tuple[int, torch.nn.Module, Trace]],
        *,
        room_bytes: int,
        planner: Planner,
        host_bytes_per_s: float,
    ) -> None:
        if make_optimizer is None:
            raise PlanError(
                "state on the host needs the optimizer whose state it is: pass its name."
            )
        (few, _, small), (many, model, large) = traced
        self.batches = Batches((few, small.graph), (many, large.graph))
        units = StateUnits(make_optimizer(model.parameters()))
        self.units = units.of(model, large, host_bytes_per_s)
        self.room, self.planner = room_bytes, planner
        self.host_bytes_per_s = host_bytes_per_s
        self._plans: dict[tuple[int, str], StatePlan | None] = {}

    def ways(
        self,
        share: float,
        batches: tuple[int, int],
        rates: Callable[[int, float], dict[str, Any]],
        begins: Callable[[str], None],
    ) -> list[Way]:
        """Return the largest batch of each way.

        Parameters
        ----------
        share
            Of a step's time that running ops again, and fetching parameters again, may take more.
        batches
            The least and the most.
        rates
            Of a batch and seconds: samples and tokens a second, by name.
        begins
            Hears the name of each way.
        """
        return [self.way(place, share, batches, rates, begins) for place in NAMES]

    def way(
        self,
        place: str,
        share: float,
        batches: tuple[int, int],
        rates: Callable[[int, float], dict[str, Any]],
        begins: Callable[[str], None],
    ) -> Way:
        begins(NAMES[place])

        def fits(batch: int) -> bool:
            plan = self.plan(batch, place)
            return plan is not None and plan.plan.overhead <= share

        batch = largest(fits, *batches)
        state_plan = self.plan(batch, place) if batch else None
        if state_plan is None:
            return Way(NAMES[place], 0, note="no plan fits in that time")
        by_host = sum(updater == "host" for updater in state_plan.updaters.values())
        seconds = state_plan.lanes.seconds
        return Way(
            NAMES[place],
            batch,
            seconds=seconds,
            **rates(batch, seconds),
            allocated_bytes=state_plan.plan.peak_bytes,
            pinned_bytes=self.host_bytes(state_plan),
            note=f"{by_host} of {len(state_plan.updaters)} parameters are updated by the host, "
            f"whose memory is taken to move {self.host_bytes_per_s / 1e9:g} GB/s; "
            f"{state_plan.lanes.hidden:.0%} of copies and its updates pass beside ops".replace(
                "%", " %"
            ),
        )

    def host_bytes(self, state_plan: StatePlan) -> int:
        """Bytes of what lies on the host; with its updates a gradient and a parameter as well."""
        # Parameters do not grow with the batch.
        sizes = {storage.name: storage.bytes for storage in self.batches.at(1).storages}
        total = 0
        for unit in self.units:
            place = state_plan.places[unit.parameter]
            if place == "device":
                continue
            by_host = state_plan.updaters.get(unit.parameter) == "host"
            copies = (place == "host" or by_host) + by_host
            total += unit.state_bytes + copies * sizes[unit.parameter]
        return total

    def plan(self, batch: int, place: str) -> StatePlan | None:
        """Return the plan at a batch that ends first; None if there is none."""
        if (batch, place) not in self._plans:
            graph = self.batches.at(batch)
            plans = [
                option for by in ("host", "device") if (option := self.planned(graph, place, by))
            ]
            best = min(plans, key=lambda option: option.lanes.seconds, default=None)
            self._plans[batch, place] = best
        return self._plans[batch, place]

    def planned(self, graph: Graph, place: str, by: str) -> StatePlan | None:
        places = {unit.parameter: place for unit in self.units if _moves(unit, place)}
        updaters = dict.fromkeys(places, by)
        try:
            return planned_with(
                graph, self.units, places, self.room, self.planner, updaters=updaters
            )
        except BudgetError:
            return None


def _moves(unit: Unit, place: str) -> bool:
    return unit.movable and (
        place == "host" or (unit.gradient is not None and unit.state_bytes > 0)
    )
