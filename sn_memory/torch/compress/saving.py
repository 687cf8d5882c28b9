"""One forward pass, watched: each tensor that autograd saves gets a name, and is kept compressed.

torch offers hooks that pack and unpack saved tensors, but a hook is given a bare tensor: not which
layer or op saved it. Counting calls (GACT) assigns wrong bits as soon as control flow changes.
Here a function mode sees each call of an op and forward hooks see each module, so a tensor is
known by module path, op and slot; what an op needs of it decides how it is kept (policy.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...activations import treatment
from ...activations.rerun import INPUT
from ..errors import ReplayError
from ..model.snapshot import version_of
from . import treatments
from .calls import DRAWS_BY_VALUE, MIN_ELEMENTS, Call, Calls, of_input_size, rectified, window_of
from .compressor import Compressor, Saved
from .signs import SignRelu
from .treatments import Exact, Kept, Layout, Lossy


@dataclass
class _Memory:
    """A storage seen in this forward pass: what autograd would hold, and what is held instead."""

    nbytes: int
    saved: bool = False
    exact: bool = False
    compressed_bytes: int = 0
    kept: dict[tuple[Any, ...], Lossy] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], str] = field(default_factory=dict)


class Promises(Protocol):
    """A unit that runs: in its first run it promises what it saves, in the second it keeps it."""

    def promise(self, layout: Layout) -> Kept:
        """Return what stands for the next tensor."""

    def fulfil(self, kept: Kept, layout: Layout) -> None:
        """Take the next tensor. May raise, to say that there are no more."""


class Pass:
    """What a forward pass, or a second one of a unit, saves while it is entered.

    Parameters
    ----------
    compressor
        Compresses.
    resident, given
        Storages that are there anyway: of the model, and of what it was given.
    path, counts
        Of modules, the innermost last; of calls so far, by path and op.
    watch
        Called with each call that saved something lossy, and its result.
    again
        The unit that runs a second time, if this is that.
    exactly
        Nothing is compressed.
    """

    def __init__(
        self,
        compressor: Compressor,
        resident: frozenset[int],
        given: frozenset[int],
        *,
        path: Sequence[str] = (),
        counts: Mapping[tuple[str, str], int] | None = None,
        watch: Callable[[Call, Any], None] | None = None,
        again: Promises | None = None,
        exactly: bool = False,
    ) -> None:
        self.compressor, self.controller = compressor, compressor.controller
        self.resident, self.left_alone, self.path = resident, resident | given, list(path)
        self.counts = dict(counts or {})
        self.first: Promises | None = None
        """The unit that runs its first time just now."""
        self._watch, self._again, self._exactly = watch, again, exactly
        self._call: Call | None = None
        self._storages: dict[int, tuple[weakref.ref[Any], _Memory]] = {}
        self._memories: list[_Memory] = []
        self._elements = 0
        self._contexts = ExitStack()

    def __enter__(self) -> Pass:
        self._contexts.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._compress, _decompress)
        )
        self._contexts.enter_context(Calls(self._called))
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        self._storages.clear()

    def enter(self, context: Any) -> None:
        """Enter a context that is left with this one."""
        self._contexts.enter_context(context)

    @property
    def can_repeat(self) -> bool:
        """Whether a unit that begins here may be one that runs again: it is in no other."""
        return self.first is None and self._again is None

    @property
    def saved(self) -> Saved:
        """What was saved so far."""
        plain = sum(memory.nbytes for memory in self._memories if memory.saved)
        held = sum(m.compressed_bytes + m.nbytes * m.exact for m in self._memories)
        return Saved(plain, held, self._elements)

    # The op that runs.

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self._call is not None or name == "__get__":
            return func(*args, **kwargs)
        path = self.path[-1] if self.path else ""
        count = self.counts[path, name] = self.counts.get((path, name), 0) + 1
        place = f"{path or 'model'}/{name}" + (f":{count}" if count > 1 else "")
        call = self._call = Call(name, place, args, kwargs)
        try:
            x = rectified(call) if self._is_innermost() else None
            result = func(*args, **kwargs) if x is None else SignRelu.apply(x, self._sign)
            if self._watch is not None and call.lossy:
                self._watch(call, result)
        finally:
            self._call = None
        return result

    def _is_innermost(self) -> bool:
        """Whether autograd calls these hooks: no checkpoint of the user's has put in its own."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] == self._compress

    # Compressing one tensor.

    def _compress(self, tensor: torch.Tensor) -> tuple[Kept, Layout]:
        path = self.path[-1] if self.path else "model"
        call = self._call or Call("", f"{path}/", (), {})
        storage = tensor.untyped_storage()
        if storage._cdata in self.left_alone:
            call.slots += 1
            return Exact(tensor), Layout.of(tensor)
        return self._delivered(tensor, call, lambda *it: self._keep(tensor, call, *it))

    def _sign(self, y: torch.Tensor) -> tuple[Kept, Layout]:
        """Keep what the backward pass of a ReLU needs."""
        assert self._call is not None
        return self._delivered(
            y,
            self._call,
            lambda key, memory: self._counted(self.compressor.sign(y, key), key, memory),
        )

    def _delivered(
        self, tensor: torch.Tensor, call: Call, keep: Callable[[str, _Memory], Kept]
    ) -> tuple[Kept, Layout]:
        key, layout = f"{call.place}/{call.slots}", Layout.of(tensor)
        call.slots += 1
        memory = self._memory(tensor.untyped_storage())
        memory.saved = True
        self._elements += layout.numel
        if self.first is not None:
            if call.name in DRAWS_BY_VALUE:
                raise ReplayError(
                    f"{call.place}: {call.name} draws a random number for each value that is not "
                    "above 0, and a second run, from rounded inputs, would draw others. Leave the "
                    "module out of recompute=."
                )
            # What a unit saves in its first run is a promise.
            if treatment(call.name) == "linear" and layout.numel >= MIN_ELEMENTS:
                call.lossy.append(key)
            return self.first.promise(layout), layout
        kept = keep(key, memory)
        if self._again is not None:
            self._again.fulfil(kept, layout)
        return kept, layout

    def given(self, tensor: torch.Tensor, name: str, place: int) -> tuple[Kept, Layout]:
        """Keep what a unit was given."""
        if tensor.untyped_storage()._cdata in self.left_alone:
            return Exact(tensor), Layout.of(tensor)
        if not treatments.is_dense(tensor):
            tensor = tensor.detach().contiguous()
        memory = self._memory(tensor.untyped_storage())
        call = Call(INPUT, f"{name}/{INPUT}", (tensor,), {})
        kept = self._keep(tensor, call, f"{name}/{INPUT}/{place}", memory)
        return kept, Layout.of(tensor)

    def know(self, tensor: torch.Tensor, kept: Kept) -> None:
        """Let a tensor be known as compressed already, should it be saved."""
        if isinstance(kept, Lossy):
            self._memory(tensor.untyped_storage()).kept[_where(tensor)] = kept

    def group(self, tensor: torch.Tensor, key: str) -> str:
        """Return the name of the memory that a tensor lies in; `key`, if it has none yet."""
        return self._memory(tensor.untyped_storage()).groups.setdefault(_where(tensor), key)

    def _memory(self, storage: Any) -> _Memory:
        """The record of a storage; an address that is used anew gets a new one."""
        found = self._storages.get(storage._cdata)
        if found is None or found[0]() is None:
            found = weakref.ref(storage), _Memory(storage.nbytes())
            self._storages[storage._cdata] = found
            self._memories.append(found[1])
        return found[1]

    def _counted(self, kept: Kept, key: str, memory: _Memory) -> Kept:
        """Note what something kept takes, other than rounded values."""
        if isinstance(kept, Exact):
            if not memory.exact:
                self.controller.observe_other(key, nbytes=memory.nbytes)
            memory.exact = True
        else:
            memory.compressed_bytes += kept.nbytes
            self.controller.observe_other(key, nbytes=kept.nbytes)
        return kept

    def _keep(self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory) -> Kept:
        """Compress a tensor; in a second run that compresses nothing, keep it."""
        if self._exactly:
            return Exact(tensor)
        kind = self._kind(tensor, call, key)
        if kind in ("linear", "nonlinear"):
            return self._lossy(tensor, call, key, memory, linear=kind == "linear")
        kept = self.compressor.exact(tensor, kind, window_of(call), key)
        return self._counted(kept, key, memory)

    def _kind(self, tensor: torch.Tensor, call: Call, key: str) -> str:
        """The treatment of a tensor: that of its op, unless it is of another type or size."""
        if tensor.numel() < MIN_ELEMENTS or not treatments.is_dense(tensor):
            return "exact"
        if not tensor.dtype.is_floating_point:
            return "integers"
        # Without a name it is an autograd function of the user's, or a checkpoint's input.
        kind = treatment(call.name) if call.name else "exact"
        if tensor.dtype == torch.float64 or kind == "exact" or not of_input_size(tensor, call):
            return "exact"
        if kind == "mask" and not self.compressor.holds_two(tensor, key):
            return "nonlinear"
        return kind

    def _lossy(
        self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory, *, linear: bool
    ) -> Kept:
        bits = self.controller.bits(key, linear=linear)
        tolerance, form = self.controller.tolerance(key), "fixed"
        if self.compressor.form == "paper" and linear:
            exact = self.controller.theory == "exact"
            tolerance = self.controller.exact_tolerance(key) if exact else tolerance
            # Until the first refresh there is no tolerance, and the fixed form does without.
            form = "paper" if 2.0**-100 <= tolerance <= 2.0**100 else "fixed"
        n, group = tensor.numel(), self.group(tensor, key)
        if bits is None or tolerance < 2.0**-100:
            memory.exact = True
            self.controller.observe(key, n=n, bits=None, variance=0.0, linear=linear, group=group)
            return Exact(tensor)
        kept = memory.kept.get(_where(tensor))
        if kept is None or kept.bits < bits:
            kept = self.compressor.rounded(tensor, bits, tolerance, form)
            if not kept.fits:
                memory.exact = True
                self.controller.overflowed(key)
                return Exact(tensor)
            memory.kept[_where(tensor)] = kept
            memory.compressed_bytes += kept.nbytes
        self.controller.observe(
            key, n=n, bits=kept.bits, variance=kept.variance, nonzero=kept.nonzero,
            linear=linear, group=group,
        )  # fmt: skip
        if linear:
            call.lossy.append(key)
        return kept


def _decompress(saved: tuple[Kept, Layout]) -> torch.Tensor:
    kept, layout = saved
    return kept.restore(layout)


def _where(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.numel(), version_of(tensor), tensor.dtype
