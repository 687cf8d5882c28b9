"""What must be as before when a model has been traced, whatever happened meanwhile.

The model's parameters are swapped for fake ones, and its forward is run: both must leave no mark. A
forward that means to leave one (a count, a new buffer, random numbers from outside torch) would not
do so when its calls are replayed, and is refused.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from ...base.errors import PlanWarning
from ..errors import SetsStateError, TraceError
from ..target.accelerator import device_types
from .marks import Generators, Marks, Values, kept_by, kept_by_global_hooks

# The hooks of torch's checkpoint, of a first and of a second run.
OF_CHECKPOINT = ("_checkpoint_hook.", "_recomputation_hook.")
# The generator behind np.random.rand and its like, which models draw from.
_legacy: Any = np.random.mtrand._rand


def casting() -> list[str]:
    """Return the kinds of devices for which autocast is on."""
    return [kind for kind in ("cpu", *device_types()) if torch.is_autocast_enabled(kind)]


# Of `is_grads_batched=True`, whose vmap is older than torch.func's and is no transform to torch.
_BATCHED = torch._C._dispatch_key_parse("Batched")


def transformed() -> bool:
    """Whether torch.func or forward-mode AD looks at what runs here."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a gradient stands for several, as with `is_grads_batched=True`."""
    return bool(torch._C._dispatch_keys(tensor).has(_BATCHED))


def warn(text: str) -> None:
    """Warn where the user's code called a model, or for a backward pass."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PlanWarning, stacklevel=level + 1)


def other_layout(gradient: torch.Tensor, like: Sequence[int]) -> str:
    """Return what to say of a gradient that lies otherwise than with these strides, or nothing.

    One that is a number expanded, as `sum` hands it over, has no layout of its own.
    """
    pairs = zip(gradient.size(), gradient.stride(), like, strict=True)
    steps = [(have, want) for size, have, want in pairs if size != 1]
    if all(have == want for have, want in steps) or not all(have for have, _ in steps):
        return ""
    return (
        f"the gradient of an output of shape {tuple(gradient.shape)} comes with strides "
        f"{gradient.stride()}, and planned was {tuple(like)}, which the output has. It is copied, "
        "so kernels that sum in the order of memory may round otherwise than without the plan. "
        "For equal bits let the model return its output in the layout of the gradient, as "
        "out.contiguous() has it."
    )


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Where a backward pass runs, as torch advises: outside of the `with` of the forward pass."""
    with ExitStack() as stack:
        for kind in casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def saved_tensors_hook() -> Callable[..., Any] | None:
    """Return what packs saved tensors here, if the caller has put hooks around."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


@contextmanager
def outside_saved_tensors_hooks() -> Iterator[None]:
    """Where hooks of the caller's, a checkpoint's among them, do not see what autograd saves.

    A step that is only traced or measured is none of theirs: they would count it, or be given
    tensors without values.
    """
    autograd = torch._C._autograd
    taken = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def changes_what_it_is_given() -> TraceError:
    """Return the refusal of a forward that writes into its arguments."""
    return TraceError(
        "the forward pass changes what it is given: it writes into a list, mapping or object among "
        "its arguments, as text models do into a cache of keys and values; a replay of its calls "
        "would not. Train without it."
    )


@contextmanager
def as_it_was(model: torch.nn.Module, given: Any = ()) -> Iterator[None]:
    """Put the model, and what its forward is given, back as they were.

    Refuses a forward that changed attributes of its modules, or what lists, mappings and objects
    hold: in these, in what it is given, in what hooks of the modules reach.
    """
    modules = dict(model.named_modules())
    slots = ("_parameters", "_buffers", "_modules")
    before = [
        (path, module, dict(module.__dict__), {slot: dict(getattr(module, slot)) for slot in slots})
        for path, module in modules.items()
    ]
    wanted = [(it, it.requires_grad) for it in (*model.parameters(), *model.buffers())]
    of_modules = (
        (f"{path}.{name}" if path else name, value)
        for path, module in modules.items()
        for name, value in kept_by(module)
        # The slots are full of fake tensors by the time they are looked at.
        if name not in slots and not name.startswith("_flat_weight")
    )
    kept = Marks(chain(of_modules, kept_by_global_hooks()))
    arguments = Marks([("arguments", given)])
    # Under fake tensors a real one that is met is computed with, and written to.
    held = [*kept.values(), *(it for _, _, attributes, _ in before for it in attributes.values())]
    values = Values(held, (*model.parameters(), *model.buffers()))
    generators = Generators(held)
    drawn = False
    changed: list[str] = []
    received: list[str] = []
    try:
        with outside_saved_tensors_hooks():
            yield
    finally:
        # Read before it is put back, and all is put back whatever is found.
        changed += kept.changed()
        received += arguments.changed()
        drawn = generators.changed()
        kept.put_back()
        arguments.put_back()
        values.put_back()
        generators.put_back()
        for path, module, attributes, parts in before:
            changed += _differences(path, module, attributes, parts)
            _fill(module.__dict__, attributes)
            for slot in slots:
                _fill(getattr(module, slot), parts[slot])
        for tensor, requires in wanted:
            tensor.requires_grad_(requires)
        torch.clear_autocast_cache()
    if received:
        raise changes_what_it_is_given()
    if drawn:
        raise TraceError(
            "the forward pass draws from a generator of the model's own, so what it does differs "
            "from step to step. Draw with torch's default generator and compute with the result."
        )
    if changed:
        raise SetsStateError(
            f"the forward pass sets {', '.join(dict.fromkeys(changed[:5]))}; a replay of its calls "
            "would not. Keep that in a buffer changed in place. If it does so in its first step "
            "only, run one step before planning."
        )


def _fill(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a dict hold what it held before.

    One that still does is left alone: filled anew, the attributes of each module would take three
    times the memory, as they no longer share their names with those of its kind.
    """
    pairs = zip_longest(held.items(), before.items(), fillvalue=("", None))
    if any(now[0] != then[0] or now[1] is not then[1] for now, then in pairs):
        held.clear()
        held.update(before)


def _differences(
    path: str,
    module: torch.nn.Module,
    attributes: dict[str, Any],
    parts: dict[str, dict[str, Any]],
) -> list[str]:
    now = module.__dict__
    names = [
        name
        for name in now.keys() | attributes.keys()
        if not name.startswith("_flat_weight") and now.get(name) is not attributes.get(name)
    ]
    for slot in ("_parameters", "_buffers"):
        held = getattr(module, slot)
        names += list(held.keys() ^ parts[slot].keys())
    return [f"{path}.{name}" if path else name for name in names]


@contextmanager
def no_chance() -> Iterator[None]:
    """Refuse a forward that draws random numbers outside torch: a replay would go one way only."""
    python, arrays = random.getstate(), _legacy.get_state(legacy=False)
    drawn = []
    try:
        yield
    finally:
        if random.getstate() != python:
            random.setstate(python)
            drawn.append("random")
        if repr(_legacy.get_state(legacy=False)) != repr(arrays):
            _legacy.set_state(arrays)
            drawn.append("numpy.random")
    if drawn:
        raise TraceError(
            f"the forward pass draws from {' and '.join(drawn)}, so what it does differs from step "
            "to step. Draw with torch and compute with the result."
        )


@contextmanager
def kernel_of_max_pool1d() -> Iterator[None]:
    """Lay results of `max_pool1d` out as its kernel of the CPU does where nothing wants a gradient.

    torch takes that kernel only where no mode sees ops; all others see max_pool2d, which lays a
    transposed input's result out by channels. A mode for functions is no way to see the call:
    attention takes another way where one is on.
    """
    own = torch.max_pool1d

    def max_pool1d(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = own(*args, **kwargs)
        plain = result.requires_grad or result.device.type != "cpu"
        return result if plain else result.contiguous()

    torch.max_pool1d = max_pool1d
    try:
        yield
    finally:
        torch.max_pool1d = own
