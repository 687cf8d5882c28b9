"""Find out that nothing calls the hook of a state, by counting the optimizer's steps.

A hook that was made and never registered, or that a strategy ignores, leaves no trace: training
goes on with plain gradients. Only the optimizer's steps are sure to come, and torch tells them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...base.errors import CompressError, UncalledWarning


class CallWatch:
    """Steps of the optimizers of some parameters since the hook was called last.

    Parameters
    ----------
    after : steps without a call after which an UncalledWarning says so, once; 0 for never
    known : the parameters' names, as Names has them; where there are none, every optimizer counts

    Raises CompressError for a number of steps that is none.
    """

    def __init__(self, after: int, known: Callable[[], list[tuple[torch.Tensor, str]]]) -> None:
        if not isinstance(after, int) or isinstance(after, bool) or after < 0:
            raise CompressError(
                f"warn_after={after!r}; expected a whole number of steps, 0 for never. Leave it "
                "out for 20."
            )
        self.after, self.steps, self._known = after, 0, known
        self._parameters: set[int] = set()
        if after:
            own = weakref.ref(self)

            def count(optimizer: Any, *_: Any) -> None:
                if (watch := own()) is not None:
                    watch.step(optimizer)

            self._handle = register_optimizer_step_post_hook(count)
            weakref.finalize(self, self._handle.remove)

    def called(self) -> None:
        """The hook was called."""
        self.steps = 0

    def step(self, optimizer: Any) -> None:
        """An optimizer has made a step; warn if that is one too many."""
        if not self._mine(optimizer):
            return
        self.steps += 1
        if self.steps == self.after:
            self._handle.remove()
            warnings.warn(
                f"the optimizer made {self.after} steps in which nothing called the hook of this "
                "CompressionState; expected a call in every backward pass. Gradients travel "
                "uncompressed, or not at all. Register it: "
                "ddp.register_comm_hook(state, compression_hook), and call ddp, not the model "
                "inside. Lightning's DDPStrategy ignores ddp_comm_hook on a CPU: use "
                "sn_compress.torch.integrations.LightningCompression. For long no_sync() set "
                "warn_after.",
                UncalledWarning,
                stacklevel=4,
            )

    def _mine(self, optimizer: Any) -> bool:
        if not self._parameters:
            self._parameters = {id(parameter) for parameter, _ in self._known()}
        if not self._parameters:
            return True
        return any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"])
