"""The modes under which a model is called: autocast, transforms, hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from ...base.errors import warn_user
from ..quirks.recurrent import refresh_flat_weights
from ..target.accelerator import device_types

# Names of the saved-tensor hooks of torch's checkpoint, in its first and in its second run.
OF_CHECKPOINT = ("_checkpoint_hook.", "_recomputation_hook.")


def casting() -> list[str]:
    """Return the device types for which autocast is on."""
    return [kind for kind in ("cpu", *device_types()) if torch.is_autocast_enabled(kind)]


# `is_grads_batched=True` uses a vmap older than torch.func's, which is not reported as a transform.
_BATCHED = torch._C._dispatch_key_parse("Batched")


def transformed() -> bool:
    """Whether this code runs under a torch.func transform or forward-mode AD."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def caches_weights(model: torch.nn.Module) -> bool:
    """Whether `parametrize.cached` is on and computing a weight changes buffers (spectral_norm).

    Several calls in it make one power iteration together; recorded calls would make one each.
    """
    return bool(parametrize._cache_enabled) and any(
        isinstance(part, parametrize.ParametrizationList)
        and part.training
        and next(part.buffers(), None) is not None
        for part in model.modules()
    )


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a gradient stands for several, as with `is_grads_batched=True`."""
    return bool(torch._C._dispatch_keys(tensor).has(_BATCHED))


def warn(text: str) -> None:
    """Warn at the user's line that called a model or a backward pass."""
    warn_user(text, torch.__path__[0])


def warn_once(warned: set[str], what: str, text: str) -> None:
    """Warn unless `what` is in `warned`, to which it is added."""
    if what not in warned:
        warned.add(what)
        warn(text)


def other_layout(gradient: torch.Tensor, like: Sequence[int]) -> str:
    """Return a warning if a gradient does not have the expected strides, else "".

    An expanded scalar, as the gradient of `sum`, has no layout of its own.
    """
    pairs = zip(gradient.size(), gradient.stride(), like, strict=True)
    steps = [(have, want) for size, have, want in pairs if size != 1]
    if all(have == want for have, want in steps) or not all(have for have, _ in steps):
        return ""
    return (
        f"the gradient of an output of shape {tuple(gradient.shape)} has strides "
        f"{gradient.stride()}; the plan expects {tuple(like)}, those of the output. It is copied, "
        "so kernels that sum in the order of memory may round otherwise than without the plan. For "
        "equal bits let the model return its output in the layout of the gradient, as "
        "out.contiguous() has it."
    )


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Turn autocast off for a backward pass; torch advises against backward under autocast."""
    with ExitStack() as stack:
        for kind in casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def saved_tensors_hook() -> Callable[..., Any] | None:
    """Return the active hook that packs saved tensors, if the caller has set hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def inside_checkpoint() -> bool:
    """Whether this runs inside a checkpoint, in its first or its second run.

    A forward that replaces a module's own must not do in the first run what it cannot do in the
    second: a checkpoint inside the model is rerun after the replacement was removed.
    """
    pack = saved_tensors_hook()
    return pack is not None and pack.__qualname__.startswith(OF_CHECKPOINT)


class Forwards:
    """Replaces the forwards of modules inside `with`."""

    def __init__(self, forwards: Mapping[torch.nn.Module, Callable[..., Any]]) -> None:
        self._forwards = forwards
        self._own = {module: module.__dict__.get("forward") for module in forwards}

    def __enter__(self) -> None:
        for module, forward in self._forwards.items():
            # Set on the instance, where it hides the method of the class.
            module.__dict__["forward"] = forward

    def __exit__(self, *error: object) -> None:
        for module, forward in self._own.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward

    @contextmanager
    def away(self) -> Iterator[None]:
        """Restore the modules' own forwards temporarily, e.g. for a trace."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


@contextmanager
def replaced_tensors(
    model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], *slots: str
) -> Iterator[None]:
    """Replace the tensors of modules temporarily; a shared tensor stays shared.

    stand_in : returns the replacement; called once for each tensor
    slots : where to replace, by default `_parameters`; all modules' first slot, then the next
    """
    modules = list(model.modules())
    held = [getattr(module, slot) for slot in slots or ("_parameters",) for module in modules]
    before = [(own, dict(own)) for own in held]
    others: dict[int, torch.Tensor] = {}
    try:
        for own, tensors in before:
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in others:
                        others[id(tensor)] = stand_in(tensor)
                    own[name] = others[id(tensor)]
        refresh_flat_weights(modules)
        yield
    finally:
        for own, tensors in before:
            own.update(tensors)
        refresh_flat_weights(modules)


@contextmanager
def outside_saved_tensors_hooks() -> Iterator[None]:
    """Remove the caller's saved-tensor hooks, including a checkpoint's, temporarily.

    A step that is only traced or measured must not call them: they would count it, or get tensors
    without values. Nor may it use weights that `parametrize.cached` holds for the caller, or add
    its own.
    """
    cached, parametrize._cache_enabled = parametrize._cache_enabled, 0
    autograd = torch._C._autograd
    taken = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        parametrize._cache_enabled = cached
        # The outermost was removed last and has to be pushed first.
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def kernel_of_max_pool1d() -> Iterator[None]:
    """Give results of `max_pool1d` the layout of its CPU kernel if nothing requires a gradient.

    torch calls that kernel only if no dispatch mode is on, and otherwise max_pool2d, whose result
    for a transposed input is channels last. The function is patched rather than intercepted by a
    function mode, since attention takes another path under one.
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
