"""What optimizers of a model do, told by torch: their steps begin, and end.

A hook that was made and never registered, or that a strategy ignores, leaves no trace: training
goes on with plain gradients. Only the optimizer's steps are sure to come. Behind one that followed
an exchange the parameters are the same on all ranks; in a backward pass they need not be.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...base.errors import CompressError, UncalledWarning


class CallWatch:
    """Steps of the optimizers of some parameters, and calls of the hook between them.

    Parameters
    ----------
    after : steps without a call after which an UncalledWarning says so, once; 0 for never
    known : the parameters' names, as Names has them; where there are none, every optimizer counts
    ended : called when an optimizer's step has ended, which is in no other's

    Attributes
    ----------
    steps : since the hook was called last
    any_step : whether there was one: parameters may also be updated by hand

    Raises CompressError for a number of steps that is none.
    """

    def __init__(
        self,
        after: int,
        known: Callable[[], list[tuple[torch.Tensor, str]]],
        ended: Callable[[], None],
    ) -> None:
        if not isinstance(after, int) or isinstance(after, bool) or after < 0:
            raise CompressError(
                f"warn_after={after!r}; expected a whole number of steps, 0 for never. Leave it "
                "out for 20."
            )
        self.after, self.steps, self._known = after, 0, known
        self.any_step = False
        self._ended = weakref.WeakMethod(ended)
        self._parameters: set[int] = set()
        self._stepping: Any = None  # the optimizer in whose step this is, of several the outer one
        self._passes = 0  # in that step
        own = weakref.ref(self)

        def begin(optimizer: Any, *_: Any) -> None:
            if (watch := own()) is not None:
                watch.begin_step(optimizer)

        def end(optimizer: Any, *_: Any) -> None:
            if (watch := own()) is not None:
                watch.end_step(optimizer)

        for handle in (
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ):
            weakref.finalize(self, handle.remove)

    def called(self) -> None:
        """The hook was called."""
        self.steps = 0

    def begin_pass(self) -> None:
        """A backward pass begins; CompressError if it is the second one in an optimizer's step."""
        optimizer = self._stepping and self._stepping()
        self._passes += 1
        if optimizer is not None and self._passes > 1:
            kind = type(optimizer).__qualname__
            raise CompressError(
                f"{kind} evaluates its closure several times in one step, and compares the "
                "gradients; compressed ones carry along what earlier evaluations left out. "
                f"Expected one evaluation a step. Train with {kind} without this hook, or take an "
                "optimizer that evaluates once, such as SGD or AdamW."
            )

    def begin_step(self, optimizer: Any) -> None:
        """An optimizer begins a step; there may be another one in it, as in ZeRO's."""
        outer = self._stepping and self._stepping()
        if self._mine(optimizer) and outer in (None, optimizer):
            self._stepping, self._passes = weakref.ref(optimizer), 0

    def end_step(self, optimizer: Any) -> None:
        """An optimizer has made a step; warn if that is one too many without the hook."""
        if not self._mine(optimizer):
            return
        self.any_step = True
        outer = self._stepping and self._stepping()
        if outer in (None, optimizer):
            self._stepping = None
            if (ended := self._ended()) is not None:
                ended()
        self.steps += 1
        if self.steps == self.after:
            self.after = 0
            warnings.warn(
                f"the optimizer made {self.steps} steps in which nothing called the hook of this "
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
