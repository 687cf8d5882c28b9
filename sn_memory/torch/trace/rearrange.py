"""Rearrangement of the recorded step, so that it holds and computes no more than necessary.

Under a trace autograd computes results that are not needed. It adds gradients into new storages, as
it cannot tell there that it holds the only reference; and computes gradients of elementwise
functions into new storages, though the old ones are not needed any more.

It also runs each layer's backward pass as soon as possible. But the gradient of a parameter is
needed only at the end, and may be larger than what it is computed from; a convolution's gradients
can be computed one by one, so that not all inputs are live at once; and some calls are passed a
tensor of which they read only the shape.

None of this changes a bit of any result: the same kernels run on the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from .record import (
    CONVOLUTION_BACKWARD,
    MASK,
    Call,
    Captured,
    Recording,
    View,
    convolution_parts,
    flattened,
)

_aten = torch.ops.aten
# Elementwise calls, with the overload that overwrites the first argument, and the name of its
# argument for the output.
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
# Argument of which only the shape is read, on the devices below; for a convolution, only by a call
# for the gradient of its input.
_SHAPE_ONLY: dict[Any, int] = {
    CONVOLUTION_BACKWARD: 1,
    _aten.max_pool2d_with_indices_backward.default: 1,
    _aten.max_pool3d_with_indices_backward.default: 1,
    _aten.avg_pool2d_backward.default: 1,
    _aten.avg_pool3d_backward.default: 1,
    _aten._adaptive_avg_pool2d_backward.default: 1,
}
_DEVICES = ("cpu", "cuda")


def separate_sums(captured: Captured) -> Captured:
    """Return a step that leaves the summation of an input's gradients to autograd.

    A part of a larger step may share an input with other parts, whose gradients come first. As
    rounding depends on the order, gradients are added one by one, not the sum of this part.
    """
    calls = captured.recording.calls
    maker = {storage: at for at, call in enumerate(calls) for storage in call.makes}
    # Per argument, not per call: x + x uses x twice. A sum that another gradient uses stays.
    uses = Counter(view.storage for call in calls for view in call.views)
    uses.update(storage for call in calls for storage in call.writes)
    uses.update(view.storage for _, view in captured.gradients if view is not None)
    dropped: set[int] = set()

    def addends(gradient: View) -> list[View]:
        """Return the summands of a gradient, in the order in which autograd added them."""
        later: list[View] = []
        while True:
            at = maker.get(gradient.storage, -1)
            call = calls[at]
            form = gradient.size, gradient.dtype
            if (
                at < captured.boundary
                or call.target is not _aten.add.Tensor
                # A third argument is `alpha`, a factor.
                or len(call.flat) != 2
                or [(view.size, view.dtype) for view in call.views] != [form, form]
                or uses[gradient.storage] > 1
            ):
                return [gradient, *reversed(later)]
            dropped.add(at)
            gradient, other = call.views
            later.append(other)

    gradients: list[tuple[str, View | None]] = []
    for name, gradient in captured.gradients:
        split = gradient is not None and name.startswith("input ")
        views = addends(gradient) if split and gradient else [gradient]
        gradients += [(name, view) for view in views]
    kept = [call for at, call in enumerate(calls) if at not in dropped]
    recording = replace(captured.recording, calls=kept)
    return replace(captured, recording=recording, gradients=tuple(gradients))


def owned(captured: Captured) -> set[int]:
    """Storages that are held outside of the calls: inputs, outputs, gradients."""
    views = [view for _, view in captured.gradients if view is not None]
    views += captured.output_gradients
    return captured.returned | {view.storage for view in views} | set(captured.recording.roles)


def last_uses(recording: Recording) -> list[int]:
    """Per storage, the last call that makes, reads or writes it; -1 for none."""
    last = [-1] * len(recording.nbytes)
    for at, call in enumerate(recording.calls):
        for storage in (*call.reads, *call.makes, *call.writes):
            last[storage] = at
    return last


def without_unused(captured: Captured) -> Captured:
    """Drop calls whose results are not read; those that draw random numbers or write stay."""
    needed = owned(captured)
    kept: list[Call] = []
    boundary = captured.boundary
    # From the end: all readers of a call are known by then.
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


def _rounds_alike(call: Call) -> bool:
    """Whether a kernel that overwrites its first argument rounds like one that does not.

    Each element is a single sum, product or quotient of real numbers, or all tensors have the same
    layout, so that kernels iterate over them in the same way: vectorized code may round differently
    than scalar code.
    """
    arithmetic = call.target in (_aten.add.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
    out = call.outputs[0]
    once = arithmetic and out is not None and not out.dtype.is_complex
    return once or len({(view.size, view.stride) for view in call.views}) == 1


def in_place(captured: Captured, *, sums_only: bool = False) -> Captured:
    """Let sums, products and elementwise gradients overwrite a gradient at its last use.

    The same kernel runs on the same numbers; only its output differs. With `sums_only` it does what
    autograd does without a trace.
    """
    recording, held = captured.recording, owned(captured)
    last = last_uses(recording)
    # Per storage of a result that now overwrites an argument, the storage of that argument.
    heir: dict[int, int] = {}
    made_backward: set[int] = set()

    def moved(value: Any) -> Any:
        if isinstance(value, View) and value.storage in heir:
            return replace(value, storage=heir[value.storage])
        return value

    def gives_way(first: View, others: list[Any], out: View, at: int) -> bool:
        return (
            all(other.storage != first.storage for other in others if isinstance(other, View))
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
            summed = call.target is _aten.add.Tensor and isinstance(others[0], View)
            # Results of the forward pass may be recomputed, unless they are overwritten.
            own = not sums_only and isinstance(first, View) and first.storage in made_backward
            may = summed or (own and _rounds_alike(call))
            if may and isinstance(first, View) and out and gives_way(first, others, out, at):
                heir[out.storage] = first.storage
                # It now lives as long as the result.
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
    """Return the variant of a call that overwrites its first argument."""
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


def split_conv_backward(captured: Captured) -> Captured:
    """Split each `convolution_backward` into two calls: weight and bias first, then the input.

    It runs separate kernels; as one call it holds its input until both have run.
    """
    calls: list[Call] = []
    for call in captured.recording.calls:
        is_both = call.target is CONVOLUTION_BACKWARD
        parts = convolution_parts(call.flat, call.spec) if is_both else []
        for mask, flat, spec in parts:
            pairs = zip(call.outputs, mask, strict=True)
            outputs = tuple(out if asked else None for out, asked in pairs)
            stays = {out.storage for out in outputs if out is not None}
            makes = tuple(make for make in call.makes if make in stays)
            part = replace(call, flat=tuple(flat), spec=spec, outputs=outputs, makes=makes)
            calls.append(part)
        if not parts:
            calls.append(call)
    return replace(captured, recording=replace(captured.recording, calls=calls))


def defer_weight_grads(captured: Captured) -> Captured:
    """Compute gradients of parameters last if they are larger than what they are computed from.

    Only those that nothing else reads, of arguments that nothing overwrites until then. Arguments
    that another deferred call already keeps are not counted.
    """
    recording, held = captured.recording, owned(captured)
    calls, last = recording.calls, last_uses(recording)
    final = {view.storage for _, view in captured.gradients if view is not None}
    # No call makes a gradient that is an input of the step.
    final -= set(recording.roles)
    written = {storage: at for at, call in enumerate(calls) for storage in call.writes}
    wanted = [
        at
        for at in range(captured.boundary, len(calls))
        if calls[at].makes
        and not calls[at].writes
        and not calls[at].random
        and all(make in final and last[make] == at for make in calls[at].makes)
        and all(written.get(read, -1) < at for read in calls[at].reads)
    ]
    late: set[int] = set()
    kept: set[int] = set(held)
    before = -1
    # What one deferred call keeps costs the next one nothing, so more calls may be worth it.
    while len(late) > before:
        before = len(late)
        for at in wanted:
            reads = set(calls[at].reads) - kept
            nbytes = sum(recording.nbytes[make] for make in calls[at].makes)
            if at not in late and sum(recording.nbytes[read] for read in reads) < nbytes:
                late.add(at)
                kept |= reads
    order = [at for at in range(len(calls)) if at not in late] + sorted(late)
    now = replace(recording, calls=[calls[at] for at in order])
    return replace(captured, recording=now, numbers=tuple(order))


def accumulate_in_place(captured: Captured, *, early_update: bool = False) -> Captured:
    """Accumulate each gradient of a parameter into an existing one, and free it.

    This happens as soon as no other call needs it or the parameter: autograd passes it on then, and
    a hook may change either. So the call counts as one that changes the parameter, too. With
    `early_update` there is no earlier gradient: a hook updates the parameter itself.
    """
    recording = captured.recording
    calls, last = recording.calls, last_uses(recording)
    parameters = dict(captured.parameters)
    read = {storage: at for at, call in enumerate(calls) for storage in values_read(call)}
    nbytes, device, roles = list(recording.nbytes), list(recording.device), dict(recording.roles)
    after: dict[int, list[tuple[int, Call]]] = {}
    summed_into: list[tuple[str, int]] = []
    for place, (name, view) in enumerate(captured.gradients):
        if view is None or name not in parameters:
            continue
        own = target = parameters[name]
        if not early_update:
            target = View(len(nbytes), own.size, own.stride, 0, own.dtype)
            roles[target.storage] = "state"
            nbytes.append(math.prod(own.size) * own.dtype.itemsize)
            device.append(recording.device[own.storage])
        summed_into.append((name, target.storage))
        flat, spec = flattened(((target, view), {}))
        at = max(last[view.storage], read.get(own.storage, -1), captured.boundary - 1)
        add, writes = _aten.add_.Tensor, tuple(dict.fromkeys((target.storage, own.storage)))
        summed = Call(add, tuple(flat), spec, (target,), (), writes, "backward", False, name)
        # Numbered by the parameter, above all calls: so the name does not depend on the position.
        after.setdefault(at, []).append((len(calls) + place, summed))
    numbered = list(after.get(-1, ()))
    for at, pair in enumerate(zip(captured.numbers or range(len(calls)), calls, strict=True)):
        numbered += [pair, *after.get(at, ())]
    arranged = [call for _, call in numbered]
    recording = replace(recording, calls=arranged, nbytes=nbytes, device=device, roles=roles)
    numbers, sums = tuple(number for number, _ in numbered), tuple(summed_into)
    result = replace(captured, recording=recording, numbers=numbers)
    return replace(result, updated=sums) if early_update else replace(result, earlier=sums)


def replace_shape_only_inputs(captured: Captured) -> Captured:
    """Replace arguments of which a call reads only the shape by other memory of that shape.

    This is memory that is live anyway: another argument of the call, a parameter, or a gradient
    that was made before and is read afterwards.
    """
    recording, held = captured.recording, owned(captured)
    last = last_uses(recording)
    trained = {name for name, _ in captured.gradients}
    parameters = [view.storage for name, view in captured.parameters if name in trained]
    live: set[int] = set()
    calls = []
    for at, call in enumerate(recording.calls):
        place = place_of_shape(call)
        if place is not None and recording.device[call.flat[place].storage].type in _DEVICES:
            others = [
                *values_read(call),
                *parameters,
                # A storage last used here is another argument, or the one to be freed.
                *sorted(storage for storage in live if last[storage] != at),
            ]
            call = _substituted(recording, call, place, others)
        calls.append(call)
        if at >= captured.boundary:
            live |= set(call.makes) - held
        live -= {read for read in (*call.reads, *call.makes) if last[read] <= at}
    return replace(captured, recording=replace(recording, calls=calls))


def place_of_shape(call: Call) -> int | None:
    """Index in the flat arguments of the tensor of which only the shape is read, or None."""
    place = _SHAPE_ONLY.get(call.target)
    if place is None or not isinstance(call.flat[place], View):
        return None
    if call.target is CONVOLUTION_BACKWARD:
        args, _ = tree_unflatten(list(call.flat), call.spec)
        # The gradient of a weight is computed from the input.
        if any(args[MASK][1:]):
            return None
    return place


def values_read(call: Call) -> list[int]:
    """Return the storages of arguments whose values are read, not only the shape."""
    shape = place_of_shape(call)
    places = enumerate(call.flat)
    return [arg.storage for at, arg in places if isinstance(arg, View) and at != shape]


def _substituted(recording: Recording, call: Call, place: int, others: list[int]) -> Call:
    view, device = call.flat[place], recording.device
    if sum(other.storage == view.storage for other in call.views) > 1:
        return call  # Another argument needs the storage anyway.
    # Elements from the first to the last.
    reach = 1 + sum((size - 1) * step for size, step in zip(view.size, view.stride, strict=True))
    nbytes = 0 if 0 in view.size else reach * view.dtype.itemsize
    for other in others:
        if recording.nbytes[other] >= nbytes and device[other] == device[view.storage]:
            flat = list(call.flat)
            flat[place] = replace(view, storage=other, offset=0)
            return replace(call, flat=tuple(flat))
    return call
