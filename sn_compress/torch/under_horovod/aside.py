"""Out of the way: an optimizer whose tuner has settled on plain makes stock Horovod's calls again.

Finding the caller, asking the tuner and counting bytes cost about 30 microseconds for each tensor.
For a small net on a fast network that is more than the 2 % that a tuned run may lose.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...settings import Settings


class Aside:
    """Stands in an optimizer in the place of its compression, for a known number of steps.

    All it does is count: Horovod asks once per tensor and step, whatever a rank has computed.

    Parameters
    ----------
    optimizer : made by hvd.DistributedOptimizer
    tensors : that it asks about in each step
    under_way : of them in the step that has begun
    steps : behind this one that it stands aside; the next begins with the compression again
    wake : called with the steps that have begun in between, at that point or by `end`
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        tensors: int,
        under_way: int,
        steps: int,
        wake: Callable[[int], object],
    ) -> None:
        self.compression = optimizer._compression
        self.settings: Settings = self.compression.settings
        self._optimizer = weakref.ref(optimizer)
        self._tensors, self._all = tensors, tensors * (steps + 1)
        self._left = self._all - (under_way - 1)  # the call that makes it 0 begins another step
        self._taken, self._wake = 0, wake
        optimizer._compression = self

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod."""
        self._left -= 1
        if self._left:
            return tensor, None
        self._left = 1  # this call's step belongs to the one that comes back
        self.end()
        return self.compression.compress(tensor)  # type: ignore[no-any-return]

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod; ctx is of a tensor that came before this stood aside."""
        return tensor if ctx is None else ctx.finish(tensor)

    @property
    def begun(self) -> int:
        """Steps that have begun since this stands aside."""
        return (self._all - self._left) // self._tensors

    def take(self) -> int:
        """Steps that have begun since the last call of this."""
        new = self.begun - self._taken
        self._taken += new
        return new

    def end(self) -> None:
        """Let the compression come back."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._compression is self:
            optimizer._compression = self.compression
            self._wake(self.begun)
