"""How large a batch fits a device with the optimizer's state on its host, ZeRO-Offload's way.

Of each batch a plan is made with all of the state on the host, and with the parameters there as
well; the host makes the updates beside the device (Ren et al. 2021), or the device does with state
that is brought and sent back, whichever ends first. It is predicted, and was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.errors import PlanError
from ..graph.batches import Batches
from ..graph.graph import Graph
from ..graph.hosted import Unit
from ..plan.plan import BudgetError
from ..plan.state import Planner, StatePlan, planned_with
from ..run.fit import Way, largest
from .state.optimizer import StateUnits
from .trace.trace import Trace

NAMES = {"state": "state on the host", "host": "parameters and state on the host"}
# Of a server: eight channels or more. An assumption, which the answer states.
HOST_BYTES_PER_S = 100e9


class OnHost:
    """The ways to train with state on the host.

    Parameters
    ----------
    make_optimizer
        A class that takes parameters alone.
    traced
        The step without an optimizer: a batch, the model, its trace; of two batches.
    room_bytes
        Of the device.
    planner
        Plans a graph within so many bytes.
    host_bytes_per_s
        What the host's memory moves.

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
            raise PlanError("state on the host needs an optimizer, whose state it is: name one.")
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
        found = self.plan(batch, place) if batch else None
        if found is None:
            return Way(NAMES[place], 0, note="no plan fits in that time")
        by_host = sum(it == "host" for it in found.updaters.values())
        seconds = found.lanes.seconds
        return Way(
            NAMES[place],
            batch,
            seconds=seconds,
            **rates(batch, seconds),
            allocated_bytes=found.plan.peak_bytes,
            pinned_bytes=self.host_bytes(found),
            note=f"{by_host} of {len(found.updaters)} parameters are updated by the host, whose "
            f"memory is taken to move {self.host_bytes_per_s / 1e9:g} GB/s; "
            f"{found.lanes.hidden:.0%} of copies and its updates pass beside ops".replace(
                "%", " %"
            ),
        )

    def host_bytes(self, found: StatePlan) -> int:
        """Bytes of what lies on the host; with its updates a gradient and a parameter as well."""
        sizes = {it.name: it.bytes for it in self.batches.at(1).storages}
        total = 0
        for unit in self.units:
            place = found.places[unit.parameter]
            if place == "device":
                continue
            by_host = found.updaters.get(unit.parameter) == "host"
            copies = (place == "host" or by_host) + by_host
            total += unit.state_bytes + copies * sizes[unit.parameter]
        return total

    def plan(self, batch: int, place: str) -> StatePlan | None:
        """Return the plan at a batch that ends first; None if there is none."""
        if (batch, place) not in self._plans:
            graph = self.batches.at(batch)
            found = [it for by in ("host", "device") if (it := self.planned(graph, place, by))]
            best = min(found, key=lambda it: it.lanes.seconds, default=None)
            self._plans[batch, place] = best
        return self._plans[batch, place]

    def planned(self, graph: Graph, place: str, by: str) -> StatePlan | None:
        places = {it.parameter: place for it in self.units if _moves(it, place)}
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
