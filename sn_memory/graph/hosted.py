"""Graphs of steps with updates, and with parameters or optimizer state on the host.

Each parameter is updated as soon as its gradient is complete and no later op reads it. State on the
host is represented by ordinary storages and ops, so that lifetimes, peaks and rebuilds need no
special treatment. A parameter `p` has the op `update p`, and if it is on the host

    fetch p            before its first use: makes `p`, which is no longer resident
    fetch state of p   before the update: makes `p (state)`
    store p            after it: writes both back

This is with the updater `device`. With `host`, the host's processor updates: the gradient is copied
there and no state comes back; a parameter that stays on the device is copied to it again:

    store gradient of p    when the gradient is complete
    host update p          parallel to the ops
    bring updated p        at the end, if `p` itself is on the device

With `in place`, device and host are the same processor, which updates `p` and its state where they
are stored, in one op `update p`, and nothing is copied.

Alternatively, all updates come after all gradients, e.g. for clipping by the norm: then parameters
on the host have their gradients there as well, and instead of the update there is

    store gradient of p    after the last op that makes or reads it

Fetching again means rerunning `fetch p`: a parameter that is dropped between the forward and the
backward pass is a rebuild like any other, at the seconds of its copy. `p (host)`, a storage of zero
bytes that `update p` changes, is read by `fetch p` and by all readers of `p`: after the update, the
values on the host and on the device have changed, so none of these ops may be rerun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from ..base.errors import GraphError
from .graph import Graph
from .records import Op, Storage, Workspace, require

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


@dataclass(frozen=True, slots=True)
class Unit:
    """A parameter with its gradient and state, placed as a unit.

    parameter : the name of its storage, a resident one
    gradient : the name of the storage of its gradient; None if it is not trained
    state_bytes : of its optimizer state
    scratch_bytes : that its update holds in addition to parameter, gradient and state
    update_s : seconds of the update by the device
    host_update_s : seconds of the update by `host`, or `in place`
    counts_bytes : of optimizer state that never moves, such as the step count
    movable : whether it may be on the host
    used_up : whether the gradient may be freed after its use; not if the caller holds it
    """

    parameter: str
    gradient: str | None
    state_bytes: int = 0
    scratch_bytes: int = 0
    update_s: float = 0.0
    movable: bool = True
    used_up: bool = True
    counts_bytes: int = 0
    host_update_s: float = 0.0


def scratch_bytes(unit: Unit, by: str) -> int:
    """Return the device's scratch bytes of an update, besides its operands.

    In place this includes the state, which the first step creates before it moves to its place.
    """
    if by == "host":
        return 0
    return unit.scratch_bytes + (unit.state_bytes if by == "in place" else 0)


def update_seconds(unit: Unit, by: str) -> float:
    """Return the seconds of an update by the device, by the host, or in place."""
    return unit.update_s if by == "device" else unit.host_update_s


def with_state(
    graph: Graph,
    units: Sequence[Unit],
    places: Mapping[str, str],
    *,
    update: str = "backward",
    updaters: Mapping[str, str] | None = None,
) -> Graph:
    """Return the graph of a step with its updates, and with some state on the host.

    graph : forward and backward pass; parameters are resident, gradients are kept.
    units : what is updated, and what may be on the host
    places : per parameter: `device` (default), `state` (its optimizer state is on the host), or
        `host` (the parameter as well). Transfer speeds are those of the graph's device.
    update : `backward`: each parameter is updated when its gradient is complete. `step`: after the
        step, which the graph then does not contain; see `step_peak` in `plan/state.py`.
    updaters : per parameter with something on the host, what updates it: `device` (default),
        `host` or `in place`.

    Raises GraphError for a unit that is not in the graph, an unknown place or updater, or a device
    without transfer speeds.
    """
    added = _AddedOps(graph, units, places, update, updaters or {})
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        # Once `update p` has written `p (host)`, an op that reads it may not run again.
        homes = tuple(
            name + HOME for name in dict.fromkeys(op.inputs) if added.place.get(name) == "host"
        )
        here = replace(op, inputs=(*op.inputs, *homes)) if homes else op
        ops += [*added.before.get(at, ()), here, *added.after.get(at, ())]
    return replace(graph, storages=tuple(added.storages()), ops=(*ops, *added.brought))


class _AddedOps:
    """The ops of copies and updates to add to a graph.

    before, after : ops to add, by the number of the op that they are next to
    brought : ops at the end, after all updates: earlier on the lane they would wait for the host,
        and delay fetches
    uses : per storage that an op reads or makes, the first op that does, and the last
    """

    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        places: Mapping[str, str],
        update: str,
        updaters: Mapping[str, str],
    ) -> None:
        require(update in UPDATES, "update", update, f"one of {', '.join(UPDATES)}")
        self.graph, self.units, self.inside = graph, units, update == "backward"
        self.place = {unit.parameter: places.get(unit.parameter, "device") for unit in units}
        self.by = {unit.parameter: updaters.get(unit.parameter, "device") for unit in units}
        self.check(places)
        self.uses: dict[int, tuple[int, int]] = {}
        arrays = graph.arrays
        for at, used in enumerate(zip(arrays.reads, arrays.outputs, strict=True)):
            for storage in chain.from_iterable(used):
                self.uses[storage] = (self.uses.get(storage, (at, at))[0], at)
        self.before: dict[int, list[Op]] = {}
        self.after: dict[int, list[Op]] = {}
        self.brought: list[Op] = []
        for unit in units:
            self.add(unit)

    def check(self, places: Mapping[str, str]) -> None:
        index = self.graph.storage_index
        for name, place in places.items():
            if name not in self.place:
                raise GraphError(f"places: there is no unit of a parameter {name!r}.")
            require(place in PLACES, f"places[{name!r}]", place, ", ".join(PLACES))
        for name, by in self.by.items():
            require(by in UPDATERS, f"updaters[{name!r}]", by, ", ".join(UPDATERS))
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
        """Record the ops of one parameter, and their places."""
        number = self.graph.storage_index
        name, place, home = unit.parameter, self.place[unit.parameter], unit.parameter + HOME
        first, last = self.uses.get(number[name], (-1, -1))
        size = self.graph.storages[number[name]].bytes
        if place == "host" and first >= 0:
            fetch = self.copy("fetch", FETCH + name, size, (home,), (name,))
            # It belongs to the phase of the op that it serves; `copy` sets backward.
            fetch = replace(fetch, phase=self.graph.ops[first].phase)
            self.before.setdefault(first, []).append(fetch)
        if unit.gradient is None:
            return
        # An update waits for the gradient, and for the last reader of the value it replaces.
        last = max(last, self.uses.get(number[unit.gradient], (-1, -1))[1])
        if not self.inside:
            if place != "device":
                moved = self.graph.storages[number[unit.gradient]].bytes
                store = self.copy("store", STORE_GRADIENT + name, moved, (unit.gradient,))
                self.after.setdefault(self.uses[number[unit.gradient]][1], []).append(store)
            return
        by = "device" if place == "device" else self.by[name]
        # The state has no storage between steps: writes to it are writes to `home`.
        changed = (home,) if place == "host" else (home, name) if place == "state" else (name,)
        if by == "host":
            self.after.setdefault(last, []).extend(self.on_the_host(unit))
            if place == "state":
                bring = self.copy("bring", BRING + name, size, (home,))
                self.brought.append(replace(bring, writes=(name,), once=True))
            return
        ops: list[Op] = []
        state: tuple[str, ...] = ()
        if place != "device" and unit.state_bytes and by == "device":
            state = (name + STATE,)
            ops.append(self.copy("fetch", FETCH_STATE + name, unit.state_bytes, (home,), state))
        # What is updated in place on the host is not on the device.
        here = () if by == "in place" and place == "host" else (name,)
        scratch = scratch_bytes(unit, by)
        # `once`: run twice it would update twice.
        ops.append(Op(UPDATE + name, (*here, unit.gradient, *state), (), changed, kind="update",
                      phase="backward", once=True, seconds=update_seconds(unit, by),
                      workspaces=(Workspace(scratch),) if scratch else ()))  # fmt: skip
        stored = (*((name,) if place == "host" and by == "device" else ()), *state)
        if stored:
            moved = (size if place == "host" else 0) + (unit.state_bytes if state else 0)
            ops.append(self.copy("store", STORE + name, moved, stored))
        self.after.setdefault(last, []).extend(ops)

    def on_the_host(self, unit: Unit) -> list[Op]:
        """Return the ops of an update by the host."""
        name, home = unit.parameter, unit.parameter + HOME
        assert unit.gradient is not None
        moved = self.graph.storages[self.graph.storage_index[unit.gradient]].bytes
        store = self.copy("store", STORE_GRADIENT + name, moved, (unit.gradient,))
        # Memory on the host waits for the update, as the update waits for the gradient.
        return [
            replace(store, writes=(home,), effect=False, once=True),
            Op(HOST_UPDATE + name, (home,), (), (home,), kind="host update", phase="backward",
               seconds=unit.host_update_s, once=True),
        ]  # fmt: skip

    def copy(
        self, kind: str, name: str, size: int, reads: tuple[str, ...], outputs: tuple[str, ...] = ()
    ) -> Op:
        """Return the op that copies `size` bytes: `store` to the host, others from there."""
        device, out = self.graph.device, kind == "store"
        seconds = device.to_host_s(size) if out else device.to_device_s(size)
        return Op(name, reads, outputs, kind=kind, phase="backward", seconds=seconds, effect=out)

    def storages(self) -> list[Storage]:
        """Return the storages: those of the graph with their new places, and the added ones."""
        used_up = {
            unit.gradient
            for unit in self.units
            if unit.used_up and (self.inside or self.place[unit.parameter] != "device")
        }
        records: list[Storage] = []
        for number, storage in enumerate(self.graph.storages):
            # Now an activation: an op makes it, so it may be dropped and fetched again.
            if self.place.get(storage.name) == "host":
                # A parameter that no op reads is never fetched.
                used = number in self.uses
                storage = replace(storage, role="activation") if used else replace(storage, bytes=0)
            elif storage.name in used_up:
                # The update consumes it; a gradient without an update is kept to the end.
                storage = replace(storage, keep=False)
            records.append(storage)
        resident = 0
        for unit in self.units:
            place = self.place[unit.parameter]
            resident += unit.counts_bytes
            if place == "device":
                resident += unit.state_bytes
                continue
            # Zero bytes: the device holds none of it; its versions order the ops.
            records.append(Storage(unit.parameter + HOME, 0, "state"))
            brought = self.inside and self.by[unit.parameter] == "device"
            if unit.gradient is not None and unit.state_bytes and brought:
                records.append(Storage(unit.parameter + STATE, unit.state_bytes))
        if resident:
            records.append(Storage(RESIDENT_STATE, resident, "state"))
        return records
