"""From recorded calls to the graph: names, roles, phases, flags, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.flop_counter import flop_registry

from ...graph.graph import Graph
from ...graph.records import Device, Op, Storage, Workspace, loss_op
from ..chunked_loss import chunked_flops, is_chunked_loss
from ..model.snapshot import hidden_statistics, named_arguments, takes_statistics
from ..quirks import grouped, recurrent
from .record import Call, Captured, View

STATE = "random state"


@dataclass(frozen=True)
class GraphBinding:
    """The graph of a capture, and the meaning of its names.

    graph : ops are the calls in order, with the op `loss` after the forward pass
    call_of : name of an op to the index of its call; `loss` has none.
    storage_of : name of a storage to its number in the recording
    random_states : name of an op, and of its storage, to the index of a call that draws random
        numbers: the storage keeps the state from which the call draws again. The op itself is not a
        call.
    """

    graph: Graph
    call_of: dict[str, int]
    storage_of: dict[str, int]
    random_states: dict[str, int] = field(default_factory=dict)


def to_graph(
    captured: Captured,
    *,
    name: str,
    device: Device,
    seconds: Sequence[float | None],
    allocator: str = "none",
    extra: Sequence[Storage] = (),
    ways: Sequence[tuple[Workspace, ...]] | None = None,
    random_state_bytes: int = 0,
    unplanned_peak_bytes: int | None = None,
) -> GraphBinding:
    """Return the graph of a capture.

    seconds : measured time per call; None leaves it to the roofline.
    allocator : how the device rounds sizes
    extra : resident storages outside of the step, e.g. the optimizer's state
    ways : per call, the workspaces of its alternative implementations; empty if it has none.
    random_state_bytes : of a generator's state in the planned memory: it is kept until the last run
        of a random op, and a second time during that run.
    unplanned_peak_bytes : see Graph
    """
    recording = captured.recording
    numbers = captured.numbers or range(len(recording.calls))
    ops = [
        f"{call.scope or call.phase}/{call.name}#{number}"
        for number, call in zip(numbers, recording.calls, strict=True)
    ]
    call_of = {op: at for at, op in enumerate(ops)}
    names = _storage_names(captured, ops)
    storages = _storages(captured, names)
    returned = captured.returned
    rows = [
        _op(call, ops[at], names, returned, captured, seconds[at])
        for at, call in enumerate(recording.calls)
    ]
    roles = {names[number]: role for number, role in recording.roles.items() if number in names}
    rows = _once_copied(rows, roles)
    if ways is not None:
        rows = [replace(row, workspaces=way) for row, way in zip(rows, ways, strict=True)]
    loss = loss_op(
        (names[view.storage] for view in captured.outputs if isinstance(view, View)),
        (names[view.storage] for view in captured.output_gradients),
    )
    rows.insert(captured.boundary, loss)
    states: dict[str, int] = {}
    # Before each op that draws, one that keeps the state in a storage that the plan may drop.
    if random_state_bytes:
        states = {f"{row.name}: {STATE}": call_of[row.name] for row in rows if row.replayable}
        rows = [op for row in rows for op in _with_state(row, random_state_bytes)]
        storages += [Storage(state, random_state_bytes, held=True) for state in states]
    if states:
        # For gradients of gradients, the step runs again from its beginning.
        storages.append(Storage(STATE, random_state_bytes, "state"))
    graph = Graph(
        [*storages, *extra],
        rows,
        name=name,
        device=device,
        allocator=allocator,
        unplanned_peak_bytes=unplanned_peak_bytes,
    )
    storage_of = {text: number for number, text in names.items()}
    return GraphBinding(graph, call_of, storage_of, states)


def _with_state(op: Op, nbytes: int) -> tuple[Op, ...]:
    """Return an op that draws from a kept state, preceded by the op that keeps the state."""
    if not op.replayable:
        return (op,)
    name = f"{op.name}: {STATE}"
    kept = Op(name, (), (name,), kind=STATE, phase=op.phase, seconds=0.0, once=True)
    # The generator's own state, restored afterwards: in addition to the scratch of the op.
    ways = tuple(replace(workspace, bytes=workspace.bytes + nbytes) for workspace in op.workspaces)
    ways = ways or (Workspace(nbytes),)
    return kept, replace(op, inputs=(*op.inputs, name), workspaces=ways)


def statistics(call: Call) -> tuple[int, ...]:
    """Indices in the flat arguments of what `hidden_statistics` names."""
    if not takes_statistics(call.target):
        return ()
    args, kwargs = call.arguments(lambda view: view)
    hidden = hidden_statistics(call.target, named_arguments(call.target, args, kwargs))
    args, kwargs = tree_unflatten(list(range(len(call.flat))), call.spec)
    places = named_arguments(call.target, args, kwargs)
    return tuple(places[name] for name in hidden if isinstance(call.flat[places[name]], View))


def flops(call: Call) -> float:
    """FLOPs of a call by torch's own counter or our rules; 0 for all others."""
    sizes = [view.size for view in call.views]
    # torch 2.13's registry has neither recurrent layers nor grouped products.
    if call.target in recurrent.OPS:
        return recurrent.flops(call.target, sizes)
    if call.target is grouped.PRODUCT:
        return grouped.flops(sizes)
    count = flop_registry.get(call.target.overloadpacket)
    if count is None and not is_chunked_loss(call.target):
        return 0.0
    args, kwargs = call.arguments(lambda view: torch.Size(view.size))
    if count is None:
        return chunked_flops(call.target, args)
    shapes = [torch.Size(out.size) if out is not None else None for out in call.outputs]
    return float(count(*args, **kwargs, out_val=shapes[0] if len(shapes) == 1 else tuple(shapes)))


_SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}


def _computes_in(call: Call) -> str:
    """Return the type that products of a call are computed in, by its short name, e.g. tf32."""
    dtypes = [view.dtype for view in call.views if view.dtype.is_floating_point]
    short = _SHORT.get(dtypes[0], "") if dtypes else ""
    switches: Any = torch.backends
    library = switches.cudnn if "conv" in call.name or "rnn" in call.name else switches.cuda.matmul
    return "tf32" if short == "fp32" and library.allow_tf32 else short


def _storage_names(captured: Captured, ops: list[str]) -> dict[int, str]:
    """Names of all storages of inputs and calls; of several paths to one, the first."""
    names: dict[int, str] = {}
    for name, view in (*captured.parameters, *captured.buffers):
        names.setdefault(view.storage, name)
    for place, source in enumerate(captured.inputs):
        if source is not None:
            names.setdefault(source.storage, f"input {place}")
    for number in captured.recording.constants:
        names.setdefault(number, f"constant {number}")
    for name, number in captured.earlier:
        names.setdefault(number, f"{name}.grad")
    for place, view in enumerate(captured.output_gradients):
        names.setdefault(view.storage, f"gradient of output {place}")
    for call, op in zip(captured.recording.calls, ops, strict=True):
        for place, number in enumerate(call.makes):
            names.setdefault(number, f"{op}.{place}" if place else op)
    return names


def _storages(captured: Captured, names: dict[int, str]) -> list[Storage]:
    recording, main = captured.recording, main_device(captured)
    gradients = {view.storage for _, view in captured.gradients if view is not None}
    gradients |= {view.storage for view in captured.output_gradients}
    # A gradient that is added to an existing one, or to its parameter, is not kept as well.
    present = {name for name, _ in (*captured.earlier, *captured.updated)}
    added = {view.storage for name, view in captured.gradients if view and name in present}
    kept = ((gradients - added) | captured.returned) - set(recording.roles)
    # Held by the caller, or by autograd, as well.
    held = captured.returned | {view.storage for view in captured.output_gradients}
    result = []
    # By number, the order of their creation, by which plans break ties.
    for number in sorted(names):
        role = recording.roles.get(number, "gradient" if number in gradients else "activation")
        # Storages elsewhere (e.g. a scalar on the host) do not count for the device's budget.
        size = recording.nbytes[number] if recording.device[number] == main else 0
        result.append(Storage(names[number], size, role, number in kept, number in held))
    return result


def _once_copied(ops: list[Op], roles: dict[str, str]) -> list[Op]:
    """Mark as `once` ops that read only the model, and among it a buffer that the step changes.

    For example the copies of its vectors that spectral_norm makes: before such an op runs again,
    the next forward pass might change the buffer, which is the reason for the copy.
    """
    changed = {name for op in ops for name in op.writes if roles.get(name) == "state"}
    return [
        replace(op, once=True)
        if changed.intersection(op.inputs)
        and all(roles.get(name) in ("parameter", "state") for name in op.inputs)
        else op
        for op in ops
    ]


def main_device(captured: Captured) -> torch.device:
    """The device whose memory is planned: of the parameters, or else of the inputs of a part."""
    views = [view for _, view in captured.parameters]
    views += [view for view in captured.inputs if view is not None]
    return captured.recording.device[views[0].storage]


def _op(
    call: Call,
    name: str,
    names: dict[int, str],
    returned: set[int],
    captured: Captured,
    seconds: float | None,
) -> Op:
    # An op that writes a resident storage may never run twice. A second run gets no statistics of
    # the model, so those do not count as written; statistics that the step makes itself do.
    hidden = [call.flat[place].storage for place in statistics(call)]
    writes = [*call.writes, *(own for own in hidden if own not in captured.recording.roles)]
    count = flops(call) if seconds is None else 0.0
    return Op(
        name,
        tuple(names[read] for read in call.reads),
        tuple(names[make] for make in call.makes),
        tuple(names[write] for write in dict.fromkeys(writes)),
        kind=call.name,
        phase=call.phase,
        seconds=seconds,
        flops=count,
        dtype=_computes_in(call) if count else "",
        random=call.random,
        # In a rerun, it draws from the state of the first run.
        replayable=call.random,
        effect=not call.makes and not call.writes,
        collective="c10d" in call.target.namespace,
        # The caller holds outputs: releasing them here would free nothing.
        once=bool(returned & set(call.makes)),
    )
