"""A pool of a device's memory for the steps of one planned model.

With `use_placing_allocator` it is the placing allocator's, where steps lie at packed addresses;
else it is torch's.

What else the program allocates then never lies between a step's tensors, and the pool can be given
back whole. torch routes a thread's allocations to a pool, not a program's: whoever runs a part of a
step enters it in its own thread, so in the backward pass autograd's, and only while that part runs.
Gradients of parameters come from the pool and outlive the step: until they are let go, their part
of it stays.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...pool.placing import PlacingAllocator
from . import placing
from .accelerator import module_of

_NOTHING = nullcontext()


class StepPool:
    """The pool, made when a step first needs it."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._device: torch.device | None = None
        self._first_bytes = 0
        self._arena: int | None = None  # of the placing allocator

    def inside(
        self, device: torch.device, first_bytes: int, *, step: int, begins: bool
    ) -> AbstractContextManager[Any]:
        """Return the context in which this thread allocates from the pool.

        Parameters
        ----------
        device
            Where the step runs.
        first_bytes
            Of the free segment with which torch's pool begins. Where another step asked for a
            smaller one, there is a new pool, and the old one goes with the tensors in it.
        step, begins
            Which step of the model this is a part of, and whether it is the first part.
        """
        memory = placing.active(device)
        if memory is not None:
            return self._placed(memory, device, step, begins=begins)
        module = module_of(device)
        if not hasattr(module, "MemPool"):
            return _NOTHING
        if self._pool is None or first_bytes > self._first_bytes:
            self._begin(module, device, first_bytes)
        found: AbstractContextManager[Any] = module.use_mem_pool(self._pool, device)
        return found

    def _placed(
        self, memory: PlacingAllocator, device: torch.device, step: int, *, begins: bool
    ) -> AbstractContextManager[Any]:
        if self._arena is None:
            self._arena = memory.new_pool(placing.index_of(device))
            weakref.finalize(self, memory.forget, self._arena)
        if begins:
            try:
                memory.begin(self._arena, step, placing.stream_of(device))
            except MemoryError as error:
                raise torch.cuda.OutOfMemoryError(str(error)) from error
        return memory.inside(self._arena)

    def _begin(self, module: Any, device: torch.device, first_bytes: int) -> None:
        # What libraries keep from their first product on must not lie in the pool, for good: each
        # thread has its own, so the backward pass makes its product as well.
        one = torch.ones(1, 1, device=device, requires_grad=True)
        with torch.enable_grad():
            (one @ one).backward()
        # Cached segments of other pools are of no use to this one, and torch does not give them
        # back for it.
        self.release()
        module.empty_cache()
        self._pool, self._device = module.MemPool(), device
        self._first_bytes = first_bytes
        if first_bytes:
            # No tensor: who counts those of the step would count this one.
            with module.use_mem_pool(self._pool, device):
                module.caching_allocator_delete(module.caching_allocator_alloc(first_bytes, device))

    def release(self) -> None:
        """Give back what nothing lies in; the next step begins with a new pool."""
        memory = placing.active()
        if memory is not None and self._arena is not None:
            memory.give_back(self._arena)
            memory.trim()
        self._pool, self._first_bytes = None, 0
        if self._device is not None:
            module_of(self._device).empty_cache()
