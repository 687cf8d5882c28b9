"""What is on around a model where it is called: autocast, transforms, hooks for saved tensors."""

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

# Names of the hooks that torch's checkpoint puts on in its first and in its second run.
OF_CHECKPOINT = ("_checkpoint_hook.", "_recomputation_hook.")


def casting() -> list[str]:
    """Return the kinds of devices for which autocast is on."""
    return [kind for kind in ("cpu", *device_types()) if torch.is_autocast_enabled(kind)]


# `is_grads_batched=True` uses a vmap older than torch.func's, which counts as no transform.
_BATCHED = torch._C._dispatch_key_parse("Batched")


def transformed() -> bool:
    """Whether torch.func or forward-mode AD transforms what runs here."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def caches_weights(model: torch.nn.Module) -> bool:
    """Whether `parametrize.cached` is on, and computing a weight changes buffers, as spectral_norm.

    Several calls in it take one step of its iteration; recorded calls would take one each.
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
    """Warn at the line of the user's that called a model, or a backward pass."""
    warn_user(text, torch.__path__[0])


def warn_once(warned: set[str], what: str, text: str) -> None:
    """Warn of something the first time; `warned` keeps what warnings were about."""
    if what not in warned:
        warned.add(what)
        warn(text)


def other_layout(gradient: torch.Tensor, like: Sequence[int]) -> str:
    """Return a warning of a gradient whose strides are not the expected ones, or nothing.

    An expanded scalar, which is the gradient of `sum`, has no layout of its own.
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
    """Where a backward pass runs, as torch advises: outside of the `with` of the forward pass."""
    with ExitStack() as stack:
        for kind in casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def saved_tensors_hook() -> Callable[..., Any] | None:
    """Return what packs saved tensors here, if the caller has put hooks around."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def inside_checkpoint() -> bool:
    """Whether this is the first or the second run of a checkpoint around it.

    A forward that stands in for a module's own must not do in the first run what it may not do in
    the second: a checkpoint of the model's runs again when the stand-in is gone.
    """
    pack = saved_tensors_hook()
    return pack is not None and pack.__qualname__.startswith(OF_CHECKPOINT)


class Forwards:
    """Forwards that replace modules' own inside `with`."""

    def __init__(self, forwards: Mapping[torch.nn.Module, Callable[..., Any]]) -> None:
        self._forwards = forwards
        self._own = {module: module.__dict__.get("forward") for module in forwards}

    def __enter__(self) -> None:
        for module, forward in self._forwards.items():
            # On the instance, where it hides the method of the class.
            module.__dict__["forward"] = forward

    def __exit__(self, *error: object) -> None:
        for module, forward in self._own.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward

    @contextmanager
    def away(self) -> Iterator[None]:
        """Give the modules their own back for a while, as a trace must see those."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


@contextmanager
def replaced_tensors(
    model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor], *slots: str
) -> Iterator[None]:
    """Let modules hold others in the places of their tensors; one that several hold stays one.

    stand_in : called once for each
    slots : which, `_parameters` where none is named; all of one before the next
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
    """Take the caller's hooks, a checkpoint's among them, off what autograd saves.

    A step that is only traced or measured must not reach them: they would count it, or get tensors
    without values. Nor may it use weights that `parametrize.cached` holds for the caller, or leave
    its own there.
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
        # The outermost was taken last and has to go back first.
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def kernel_of_max_pool1d() -> Iterator[None]:
    """Lay results of `max_pool1d` out as its CPU kernel does where nothing requires a gradient.

    torch calls that kernel only where no dispatch mode is on; otherwise it calls max_pool2d, whose
    result for a transposed input is channels last. The function is replaced, as attention takes
    another path where a function mode is on.
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
