"""Two corrections to what was recorded, so that it costs no more than it must.

Autograd computes things nobody asks for under a trace. It adds gradients into new storages, as it
cannot tell there that it holds the only reference; and passes a gradient through an elementwise
function into a new one, though nobody needs the old one any more. Neither changes a bit of any
result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from .captured import Captured
from .record import Call, Recording, View, flattened

_aten = torch.ops.aten
# Elementwise calls, with the overload that writes over the first argument, and the name under which
# that one wants to be told where to write.
IN_PLACE: dict[Any, tuple[Any, str | None]] = {
    _aten.add.Tensor: (_aten.add_.Tensor, None),
    _aten.mul.Tensor: (_aten.mul_.Tensor, None),
    _aten.div.Tensor: (_aten.div_.Tensor, None),
    **{
        call.default: (call.grad_input, "grad_input")
        for call in (
            *(_aten.threshold_backward, _aten.hardtanh_backward, _aten.leaky_relu_backward),
            *(_aten.gelu_backward, _aten.silu_backward, _aten.elu_backward),
            *(_aten.sigmoid_backward, _aten.tanh_backward, _aten.softplus_backward),
        )
    },
}


def owned(captured: Captured) -> set[int]:
    """Storages that somebody holds beyond the calls: what is given, handed out or handed in."""
    views = [view for view in captured.outputs if isinstance(view, View)]
    views += [
        *captured.output_gradients,
        *(view for _, view in captured.gradients if view is not None),
    ]
    return {view.storage for view in views} | set(captured.recording.given)


def last_uses(recording: Recording) -> list[int]:
    """Per storage, the last call that makes, reads or writes it; -1 for none."""
    last = [-1] * len(recording.nbytes)
    for at, call in enumerate(recording.calls):
        for storage in (*call.reads, *call.makes, *call.writes):
            last[storage] = at
    return last


def without_unused(captured: Captured) -> Captured:
    """Leave calls out whose results nobody reads; those that draw or write stay."""
    needed = owned(captured)
    kept: list[Call] = []
    boundary = captured.boundary
    for at in reversed(range(len(captured.recording.calls))):
        call = captured.recording.calls[at]
        idle = call.makes and not call.writes and not call.random
        if idle and not needed & set(call.makes):
            boundary -= at < captured.boundary
            continue
        needed |= {*call.reads, *call.writes}
        kept.append(call)
    recording = replace(captured.recording, calls=kept[::-1])
    return replace(captured, recording=recording, boundary=boundary)


def _rounds_once(call: Call) -> bool:
    """Whether each number of a result is one sum, product or quotient of real numbers."""
    arithmetic = call.target in (_aten.add.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
    out = call.outputs[0]
    return arithmetic and out is not None and not out.dtype.is_complex


def _laid_out_alike(call: Call) -> bool:
    """Whether all tensors of a call lie alike, so that any kernel walks through them in one way."""
    views = [it for it in call.flat if isinstance(it, View)]
    return all((it.size, it.stride) == (views[0].size, views[0].stride) for it in views)


def in_place(captured: Captured, *, sums_only: bool = False) -> Captured:
    """Write sums, products and elementwise gradients over a gradient, where that is its last use.

    The same kernel runs on the same numbers; only where it writes differs. With `sums_only` it is
    what autograd does without a trace. A kernel that rounds more than once an element must also
    walk through them in the same order: a vector's lanes may round otherwise than one number does.
    """
    recording, held = captured.recording, owned(captured)
    last = last_uses(recording)
    heir: dict[int, int] = {}
    made_backward: set[int] = set()

    def moved(value: Any) -> Any:
        if isinstance(value, View) and value.storage in heir:
            return replace(value, storage=heir[value.storage])
        return value

    def gives_way(first: Any, others: tuple[Any, ...], out: Any, at: int) -> bool:
        return (
            isinstance(first, View)
            and isinstance(out, View)
            and all(it.storage != first.storage for it in others if isinstance(it, View))
            and first.storage not in held
            and last[first.storage] == at
            and replace(first, storage=out.storage) == out
            and recording.nbytes[first.storage] == recording.nbytes[out.storage]
            and recording.device[first.storage] == recording.device[out.storage]
        )

    calls = []
    for at, old in enumerate(recording.calls):
        call = replace(
            old,
            flat=tuple(moved(arg) for arg in old.flat),
            writes=tuple(heir.get(storage, storage) for storage in old.writes),
            outputs=tuple(moved(out) for out in old.outputs),
        )
        if call.phase == "backward":
            made_backward.update(call.makes)
        if call.phase == "backward" and call.target in IN_PLACE and not call.writes:
            first, *others = call.flat
            out = call.outputs[0]
            # What the forward pass made may be dropped and made again, unless it is written over.
            ours = isinstance(first, View) and first.storage in made_backward
            summed = call.target is torch.ops.aten.add.Tensor and isinstance(others[0], View)
            alike = _rounds_once(call) or _laid_out_alike(call)
            if (summed or (ours and alike and not sums_only)) and gives_way(
                first, tuple(others), out, at
            ):
                assert out is not None
                heir[out.storage] = first.storage
                last[first.storage] = last[out.storage]
                if out.storage in held:
                    held.add(first.storage)
                call = _over(call, first)
        calls.append(call)
    return replace(
        captured,
        recording=replace(recording, calls=calls),
        gradients=tuple((name, moved(view)) for name, view in captured.gradients),
    )


def _over(call: Call, first: View) -> Call:
    """Return a call as one that writes its result over its first argument."""
    target, place = IN_PLACE[call.target]
    flat, spec = call.flat, call.spec
    if place is not None:
        args, kwargs = tree_unflatten(list(flat), spec)
        leaves, spec = flattened((args, {**kwargs, place: first}))
        flat = tuple(leaves)
    return replace(
        call,
        target=target,
        flat=flat,
        spec=spec,
        outputs=(first,),
        makes=(),
        writes=(first.storage,),
    )
