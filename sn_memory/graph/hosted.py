"""A step that ends with its update, and of which parameters and optimizer state lie on the host.

Each parameter is updated as soon as its gradient is complete and no later op reads it. What lies on
the host is written as ordinary storages and ops, so that lifetimes, peaks and rebuilds of it are
nothing new to anyone. For a parameter `p` there is `update p`, and where it lies on the host

    fetch p            before its first use: makes `p`, which is resident no more
    fetch state of p   before the update: makes `p (state)`
    store p            after it: writes both back

Who updates what lies on the host is told apart. `device`: as above. `host`: its processor does, so
the gradient goes there and no state comes here; what stays on the device is brought anew:

    store gradient of p    when the gradient is complete
    host update p          beside the ops
    bring updated p        at the end, where `p` itself is on the device

`in place`: device and host are one processor, which updates `p` and its state where they rest, in
one op `update p`, and nothing is copied.

Or all updates come when all gradients are there, as where they are clipped by their norm: then what
is on the host has its gradient there as well, and in place of the update there is

    store gradient of p    after the last op that makes or reads it

To fetch again is to run `fetch p` again: a parameter that is let go between the forward and the
backward pass is a rebuild like any other, at the seconds of its way. `p (host)`, a storage of no
bytes that `update p` changes, is read by `fetch p` and by all that reads `p`: after the update both
what is fetched and what is on the device is another value, with which nothing may run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ..base.errors import GraphError
from .graph import Graph
from .records import Op, Storage, Workspace
from .unit import Unit, scratch_bytes, update_seconds

FETCH: Final = "fetch "
FETCH_STATE: Final = "fetch state of "
UPDATE: Final = "update "
STORE: Final = "store "
STORE_GRADIENT: Final = "store gradient of "
HOST_UPDATE: Final = "host update "
BRING: Final = "bring updated "
STATE: Final = " (state)"
HOME: Final = " (host)"
RESIDENT_STATE: Final = "optimizer state on the device"
PLACES: Final = ("device", "state", "host")
UPDATES: Final = ("backward", "step")
UPDATERS: Final = ("device", "host", "in place")


def with_state(
    graph: Graph,
    units: Sequence[Unit],
    places: Mapping[str, str],
    *,
    update: str = "backward",
    updaters: Mapping[str, str] | None = None,
) -> Graph:
    """Return the graph of a step with its updates, and with this state on the host.

    Parameters
    ----------
    graph
        Forward and backward pass; parameters are resident, gradients are kept.
    units
        What is updated, and what may lie on the host.
    places
        Per parameter: `device` (default), `state` (its optimizer state is on the host), or `host`
        (the parameter as well). Speeds of the way are those of the graph's device.
    update
        `backward`: each parameter is updated when its gradient is complete. `step`: after the step,
        which the graph then says nothing of; see `step_peak` in `plan/state.py`.
    updaters
        Per parameter of which something lies on the host, who updates it: `device` (default),
        `host` or `in place`.

    Raises
    ------
    GraphError
        For a unit that the graph does not know, a place or an updater there is not, or a device
        without speeds.
    """
    maker = _Maker(graph, units, places, update, updaters or {})
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        homes = tuple(it + HOME for it in dict.fromkeys(op.inputs) if maker.place.get(it) == "host")
        here = replace(op, inputs=(*op.inputs, *homes)) if homes else op
        ops += [*maker.before.get(at, ()), here, *maker.after.get(at, ())]
    return Graph(
        maker.storages(), [*ops, *maker.brought], name=graph.name, device=graph.device,
        allocator=graph.allocator, aliases=graph.aliases,
        unplanned_peak_bytes=graph.unplanned_peak_bytes,
    )  # fmt: skip


def _scratch(size: int) -> tuple[Workspace, ...]:
    return (Workspace(size),) if size else ()


class _Maker:
    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        places: Mapping[str, str],
        update: str,
        updaters: Mapping[str, str],
    ) -> None:
        if update not in UPDATES:
            raise GraphError(f"got update {update!r}, expected one of {', '.join(UPDATES)}.")
        self.graph, self.units, self.inside = graph, units, update == "backward"
        self.place = {unit.parameter: places.get(unit.parameter, "device") for unit in units}
        self.by = {it.parameter: updaters.get(it.parameter, "device") for it in units}
        self.check(places)
        self.uses: dict[int, tuple[int, int]] = {}
        for at, (reads, outputs) in enumerate(
            zip(graph.arrays.reads, graph.arrays.outputs, strict=True)
        ):
            for storage in (*reads, *outputs):
                self.uses[storage] = (self.uses.get(storage, (at, at))[0], at)
        self.before: dict[int, list[Op]] = {}
        self.after: dict[int, list[Op]] = {}
        # When all updates are made: before, they would keep fetches waiting for the host.
        self.brought: list[Op] = []
        for unit in units:
            self.add(unit)

    def check(self, places: Mapping[str, str]) -> None:
        index = self.graph.storage_index
        for name, place in places.items():
            if name not in self.place:
                raise GraphError(f"places: there is no unit of a parameter {name!r}.")
            if place not in PLACES:
                raise GraphError(f"places[{name!r}]: got {place!r}, expected {', '.join(PLACES)}.")
        for name, by in self.by.items():
            if by not in UPDATERS:
                raise GraphError(f"updaters[{name!r}]: got {by!r}, expected {', '.join(UPDATERS)}.")
        for unit in self.units:
            for name in (unit.parameter, *([unit.gradient] if unit.gradient else [])):
                if name not in index:
                    raise GraphError(f"units: the graph has no storage named {name!r}.")
            if self.place[unit.parameter] != "device":
                if not unit.movable:
                    raise GraphError(f"places: {unit.parameter!r} may not lie on the host.")
                if not self.graph.device.can_offload:
                    raise GraphError("the graph's device states no transfer speeds.")

    def add(self, unit: Unit) -> None:
        """Note the ops of one parameter, and where they go."""
        number = self.graph.storage_index
        name, place, home = unit.parameter, self.place[unit.parameter], unit.parameter + HOME
        first, last = self.uses.get(number[name], (-1, -1))
        size = self.graph.storages[number[name]].bytes
        if place == "host" and first >= 0:
            fetch = Op(FETCH + name, (home,), (name,), kind="fetch",
                       phase=self.graph.ops[first].phase,
                       seconds=self.seconds(size, back=True))  # fmt: skip
            self.before.setdefault(first, []).append(fetch)
        if unit.gradient is None:
            return
        last = max(last, self.uses.get(number[unit.gradient], (-1, -1))[1])
        if not self.inside:
            if place != "device":
                moved = self.graph.storages[number[unit.gradient]].bytes
                store = Op(STORE_GRADIENT + name, (unit.gradient,), (), kind="store",
                           phase="backward", seconds=self.seconds(moved, back=False),
                           effect=True)  # fmt: skip
                self.after.setdefault(self.uses[number[unit.gradient]][1], []).append(store)
            return
        by = "device" if place == "device" else self.by[name]
        changed = (home,) if place == "host" else (home, name) if place == "state" else (name,)
        if by == "host":
            self.after.setdefault(last, []).extend(self.on_the_host(unit))
            if place == "state":
                came = self.seconds(size, back=True)
                self.brought.append(Op(BRING + name, (home,), (), (name,), kind="bring",
                                       phase="backward", seconds=came, once=True))  # fmt: skip
            return
        ops: list[Op] = []
        state: tuple[str, ...] = ()
        if place != "device" and unit.state_bytes and by == "device":
            state = (name + STATE,)
            ops.append(Op(FETCH_STATE + name, (home,), state, kind="fetch", phase="backward",
                          seconds=self.seconds(unit.state_bytes, back=True)))  # fmt: skip
        here = () if by == "in place" and place == "host" else (name,)
        ops.append(Op(UPDATE + name, (*here, unit.gradient, *state), (), changed, kind="update",
                      phase="backward", once=True,
                      seconds=update_seconds(unit, by),
                      workspaces=_scratch(scratch_bytes(unit, by))))  # fmt: skip
        stored = (*((name,) if place == "host" and by == "device" else ()), *state)
        if stored:
            moved = (size if place == "host" else 0) + (unit.state_bytes if state else 0)
            ops.append(Op(STORE + name, stored, (), kind="store", phase="backward",
                          seconds=self.seconds(moved, back=False), effect=True))  # fmt: skip
        self.after.setdefault(last, []).extend(ops)

    def on_the_host(self, unit: Unit) -> list[Op]:
        """Return the ops of an update by the host."""
        name, home = unit.parameter, unit.parameter + HOME
        assert unit.gradient is not None
        number = self.graph.storage_index
        sent = self.seconds(self.graph.storages[number[unit.gradient]].bytes, back=False)
        # What is on the host waits for it, as the host does for the gradient.
        return [
            Op(STORE_GRADIENT + name, (unit.gradient,), (), (home,), kind="store",
               phase="backward", seconds=sent, once=True),
            Op(HOST_UPDATE + name, (home,), (), (home,), kind="host update", phase="backward",
               seconds=unit.host_update_s, once=True),
        ]  # fmt: skip

    def seconds(self, size: int, *, back: bool) -> float:
        """Return what moving so many bytes takes."""
        device = self.graph.device
        speed = device.to_device_bytes_per_s if back else device.to_host_bytes_per_s
        assert speed is not None
        return device.transfer_latency_s + size / speed

    def storages(self) -> list[Storage]:
        """Return the storages: those of the graph, by where they lie now, and the new ones."""
        used_up = {
            unit.gradient
            for unit in self.units
            if unit.used_up and (self.inside or self.place[unit.parameter] != "device")
        }
        found: list[Storage] = []
        for storage in self.graph.storages:
            if self.place.get(storage.name) == "host":
                # One that no op reads stays where it is.
                used = self._is_used(storage.name)
                moved = replace(storage, role="activation") if used else replace(storage, bytes=0)
                found.append(moved)
            elif storage.name in used_up:
                found.append(replace(storage, keep=False))
            else:
                found.append(storage)
        resident = 0
        for unit in self.units:
            place = self.place[unit.parameter]
            resident += unit.counts_bytes
            if place == "device":
                resident += unit.state_bytes
                continue
            found.append(Storage(unit.parameter + HOME, 0, "state"))
            brought = self.inside and self.by[unit.parameter] == "device"
            if unit.gradient is not None and unit.state_bytes and brought:
                found.append(Storage(unit.parameter + STATE, unit.state_bytes))
        if resident:
            found.append(Storage(RESIDENT_STATE, resident, "state"))
        return found

    def _is_used(self, name: str) -> bool:
        return self.graph.storage_index[name] in self.uses
