"""How large a batch fits a device of the table, in each way to train, and how fast it would be.

Plain steps are run without values at each batch that is looked at. Plans are made on the graph of
the step at that batch, which follows from two traces (`graph/batches.py`). Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..base.errors import GraphError
from ..base.progress import report_progress
from ..check.replay import check_plan
from ..cost.devices import named
from ..graph.batches import Batches
from ..graph.graph import Graph
from ..plan.api import plan_graph
from ..plan.plan import BudgetError, Plan
from ..run.estimate import Estimate
from ..run.fit import PLAIN, Fit, Held, Units, Way, categories, largest, on_cards
from .errors import TraceError
from .estimate import estimate
from .fit_state import HOST_BYTES_PER_S, OnHost
from .target.capacity import units_of
from .target.gpu import Gpu
from .trace.fake_step import fake_step_on
from .trace.trace import Trace, call_arguments, trace

# Of a batch and a length (None: the sample's own), a model and its sample.
Make = Callable[[int, int | None], tuple[torch.nn.Module, Any]]
_TRACED = (2, 4)
_EXCHANGE = "what cards exchange takes no time here, so seconds are the least"
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
    return asked.answer(batches, sorted({it for it in cards if it > 1}), extra, host)


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
            notes.append(f"no plan is told: {error}")
        if self._batches is not None:
            ways += [self.planned(share, plain, batches, offload=False) for share in extra]
            if extra:
                ways.append(self.planned(middle, plain, batches, offload=True))
        if host_bytes_per_s is not None and self._batches is not None:
            found = self.on_host(host_bytes_per_s)
            ways += found.ways(middle, batches, self._rates, self._say)
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
        found = self.at(batch)
        return max(found.peak_bytes, found.reserved_bytes) <= self.room

    def plain(self, batch: int) -> Way:
        if not batch:
            short = self.at(next(iter(self._estimates)))
            return Way(
                PLAIN, 0, allocated_bytes=short.peak_bytes, note="the least batch is too large"
            )
        found = self.at(batch)
        seconds = found.seconds
        return Way(
            PLAIN,
            batch,
            seconds=seconds,
            **self._rates(batch, seconds),
            allocated_bytes=found.peak_bytes,
            reserved_bytes=found.reserved_bytes,
            pinned_bytes=0,
            bytes=categories(found),
        )

    def planned(self, share: float, plain: int, batches: tuple[int, int], *, offload: bool) -> Way:
        least, most = batches
        name = f"plan, +{share:.0%} time".replace("%", " %")
        name += ", offload" if offload else ""
        self._say(name)

        def fits(batch: int) -> bool:
            plan = self.plan(batch, offload)
            return plan is not None and plan.overhead <= share

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
            found = self.at(min(self._estimates))
            return on_cards(
                count,
                parameters_bytes=found.parameters_bytes,
                gradients_bytes=found.gradients_bytes,
                optimizer_bytes=found.optimizer_bytes,
                rest_bytes=self.rest(batch) + found.workspace_bytes,
                units=units,
            )

        batch = largest(lambda it: held(it).peak_bytes <= self.room, *batches)
        if not batch:
            return Way(name, 0, count, note="the least batch is too large")
        it = held(batch)
        seconds = self._step_s(batch, count)
        return Way(
            name,
            batch,
            count,
            seconds=seconds,
            **self._rates(batch, seconds, count),
            allocated_bytes=it.peak_bytes,
            pinned_bytes=0,
            bytes={
                "parameters": it.parameters_bytes,
                "gradients": it.gradients_bytes,
                "optimizer": it.optimizer_bytes,
                "gathered": it.gathered_bytes,
                "all else at its peak": it.rest_bytes,
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
        traced = list(self._steps(None))
        return OnHost(
            self.optimizer,
            traced,
            room_bytes=self.room,
            planner=self.search,
            host_bytes_per_s=host_bytes_per_s,
        )

    def _traced(self) -> Batches:
        graphs = [(batch, traced.graph) for batch, _, traced in self._steps(self.optimizer)]
        return Batches(*graphs)

    def _steps(self, optimizer: Any) -> Iterator[tuple[int, torch.nn.Module, Trace]]:
        """Trace the step at two batches, with this optimizer's state."""
        for batch in _TRACED:
            self._say(f"trace, batch {batch}")
            model, sample = self.make(batch, self.length)
            with self._casting():
                yield batch, model, trace(model, sample, device=self.device, optimizer=optimizer)

    def _update_s(self) -> float:
        """Seconds of the optimizer's step: those of a whole step beyond its graph."""
        found = self.at(max(self._estimates))
        moved = 2 * (found.parameters_bytes + found.optimizer_bytes) + found.gradients_bytes
        rate = named(self.device).device().bytes_per_s
        return moved / rate if rate and found.optimizer_bytes else 0.0

    def _step_s(self, batch: int, count: int) -> float | None:
        if self._batches is None:
            return None
        ways = self._batches.at(batch).arrays.seconds
        return sum(it[0] for it in ways) + self._update_s() / count

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
