"""A trace in which storages wait compressed: what `rewrite.py` does to a graph, done to the calls.

Two more calls and two more storages for each; calls of the backward pass look at what was restored,
or are replaced by calls that read the compressed form as it is (`forms.reading`). The program then
runs them as it runs any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_flatten

from ...graph.rewrite import COMPRESS, DECOMPRESS, RESTORED, SMALL, as_run
from ...plan.plan import Plan
from ..trace.compressible import Compress, Decompress, reading
from ..trace.record import Call, View, byte_view
from ..trace.to_graph import Named
from ..trace.trace import Trace


def as_planned(traced: Trace, plan: Plan, *, seed: int = 0) -> Trace:
    """Return the trace whose graph a plan runs: with its compressed storages, if it has any.

    Parameters
    ----------
    seed
        Of the rounding; each storage and each step draws other numbers from it.
    """
    graph = as_run(traced.graph, (action.target for action in plan.actions if action.kind == "run"))
    if graph is traced.graph:
        return traced
    named, recording = traced.named, traced.captured.recording
    calls, nbytes = list(recording.calls), list(recording.nbytes)
    device = list(recording.device)
    call_of, storage_of = dict(named.call_of), dict(named.storage_of)
    restored: dict[int, int] = {}
    direct: dict[int, int] = {}
    for op in graph.ops:
        if op.kind != "compress" or op.name in call_of:
            continue
        name = op.name.removeprefix(COMPRESS)
        storage, form = named.storage_of[name], traced.forms[name]
        small, again = len(nbytes), len(nbytes) + 1
        nbytes.append(form.nbytes)
        device.append(device[storage])
        storage_of[name + SMALL] = small
        call_of[op.name] = len(calls)
        compress = Compress(form, seed * 2**32 + storage)
        own = replace(form.view, storage=storage)
        calls.append(_call(compress, own, byte_view(small, form.nbytes), "forward"))
        if form.direct:
            direct[storage] = small
            continue
        restored[storage] = again
        nbytes.append(nbytes[storage])
        device.append(device[storage])
        storage_of[name + RESTORED] = again
        call_of[DECOMPRESS + name] = len(calls)
        back = replace(form.view, storage=again)
        calls.append(_call(Decompress(form), byte_view(small, form.nbytes), back, "backward"))
    by_number = {named.storage_of[name]: form for name, form in traced.forms.items()}
    for at, call in enumerate(recording.calls):
        if call.phase != "backward":
            continue
        for storage in direct.keys() & set(call.reads):
            other = reading(call, by_number[storage], storage, direct[storage])
            assert other is not None
            call = other
        calls[at] = _looking_at(call, restored)
    return Trace(
        Named(graph, call_of, storage_of, named.random_states),
        replace(
            traced.captured,
            recording=replace(recording, calls=calls, nbytes=nbytes, device=device),
        ),
        traced.forms,
        traced.layouts,
    )


def _call(target: Any, read: View, made: View, phase: str) -> Call:
    """A call that makes one storage of another."""
    flat, spec = tree_flatten(((read,), {}))
    return Call(target, tuple(flat), spec, (made,), (made.storage,), (), phase, random=False)


def _looking_at(call: Call, instead: dict[int, int]) -> Call:
    """The call with other storages in the place of some that it reads."""
    if not instead.keys() & set(call.reads):
        return call
    flat = tuple(
        replace(arg, storage=instead[arg.storage])
        if isinstance(arg, View) and arg.storage in instead
        else arg
        for arg in call.flat
    )
    return replace(call, flat=flat)
