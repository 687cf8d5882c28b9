"""Two corrections to what was recorded, so that it costs what the real run costs.

Autograd computes things nobody asks for under a trace, and adds gradients into new storages, as it
cannot tell there that it holds the only reference. Neither changes a bit of any result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .recorder import Call, Recording, View

if TYPE_CHECKING:
    from .capture import Captured


def owned(captured: Captured) -> set[int]:
    """Storages that somebody holds beyond the calls: what is given, handed out or handed in."""
    views = [view for view in captured.outputs if isinstance(view, View)]
    views += [*captured.tangents, *(view for _, view in captured.gradients if view is not None)]
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


def added_in_place(captured: Captured) -> Captured:
    """Write sums of gradients over their first term, where that is its last use."""
    recording, held = captured.recording, owned(captured)
    last = last_uses(recording)
    heir: dict[int, int] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, View) and value.storage in heir:
            return replace(value, storage=heir[value.storage])
        return value

    def gives_way(first: Any, second: Any, out: Any, at: int) -> bool:
        return (
            all(isinstance(it, View) for it in (first, second, out))
            and second.storage != first.storage
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
        if call.phase == "backward" and call.target is torch.ops.aten.add.Tensor:
            first, second = call.flat[:2]
            out = call.outputs[0]
            if out is not None and gives_way(first, second, out, at):
                heir[out.storage] = first.storage
                last[first.storage] = last[out.storage]
                if out.storage in held:
                    held.add(first.storage)
                call = replace(
                    call,
                    target=torch.ops.aten.add_.Tensor,
                    outputs=(first,),
                    makes=(),
                    writes=(first.storage,),
                )
        calls.append(call)
    return replace(
        captured,
        recording=replace(recording, calls=calls),
        gradients=tuple((name, moved(view)) for name, view in captured.gradients),
    )
