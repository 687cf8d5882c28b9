"""Asynchronous collectives of a process group; the DDP model of a hook; tracking optimizer steps.

register_comm_hook does not notify the state, and a bucket does not refer to its model. So
`HookedModel` searches for the model when a pass begins with a new bucket: it must be alive, since
it calls the hook.

A hook that was never registered, or that a strategy ignores, leaves no trace: training continues
with uncompressed gradients. Only the optimizer's steps are certain to happen, so `CallWatch` counts
those. After a step that followed an exchange the parameters are equal on all ranks; during a
backward pass they need not be.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from ..collective import Collective
from ..errors import CompressError, UncalledWarning
from .outcomes import live_objects, watch_optimizers

# torch 2.13 renamed these, and warns if the old names are used.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_STEPS_FILE = Optimizer.profile_hook_step.__code__.co_filename


class Collectives:
    """Collectives of a process group, None for the default one; CompressError if it is no group."""

    def __init__(self, group: Any) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise CompressError(
                f"CompressionState got a {type(group).__qualname__} as process_group; expected a "
                "group of torch.distributed, or None for all ranks. Pass the arguments after it by "
                "name: named_parameters=..., scaler=..."
            )
        self.group = group
        # Entered while this waits for other ranks; a state sets its timer here.
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return dist.get_rank(self.group)

    def sum(self, tensor: torch.Tensor) -> dist.Work:
        """Start summing a tensor over the ranks, in place."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def gather(
        self, words: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> tuple[dist.Work, torch.Tensor]:
        """Start gathering the ranks' words, concatenated; sizes : of each rank, if unequal."""
        if sizes is None or len(set(sizes)) == 1:
            gathered = words.new_empty(self.ranks * words.numel())
            return all_gather(gathered, words, group=self.group, async_op=True), gathered
        # No backend gathers vectors of unequal lengths into one; this sends as many bytes.
        return self.all_to_all(words.repeat(self.ranks), [words.numel()] * self.ranks, sizes)

    def all_to_all(
        self,
        words: torch.Tensor,
        to_ranks: Sequence[int],
        of_ranks: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> tuple[dist.Work, torch.Tensor]:
        """Start sending each rank its words; received into `into`, or a new tensor."""
        output = words.new_empty(sum(of_ranks)) if into is None else into
        work = dist.all_to_all_single(
            output, words, list(of_ranks), list(to_ranks), group=self.group, async_op=True
        )
        return work, output

    def total(self, words: npt.NDArray[Any], device: torch.device) -> npt.NDArray[Any]:
        """Sum an array over the ranks, using this device; blocks."""
        total = torch.from_numpy(words.copy()).to(device)  # a copy, as it is summed in place
        with self.waiting():
            self.sum(total).wait()
        return np.asarray(total.cpu().numpy())

    def averages(
        self, views: Sequence[torch.Tensor], packed: torch.Tensor | None
    ) -> Generator[None, None, None]:
        """Average vectors of one dtype in place; yields once the sum has begun, then waits for it.

        packed : a vector that consists of exactly these views, if there is one
        """
        together = torch.cat(list(views)) if packed is None else packed
        together.div_(self.ranks)  # before summing, as the sum might overflow half precision
        work = self.sum(together)
        yield
        with self.waiting():
            work.wait()
        if packed is None:
            means = together.split([view.numel() for view in views])
            for view, mean in zip(views, means, strict=True):
                view.copy_(mean)

    def begin(self, carry: Collective) -> tuple[dist.Work, torch.Tensor]:
        """Start a collective requested by the engine; return the arguments of `result`."""
        if carry.kind == "gather":
            return self.gather(carry.words, carry.sizes)
        if carry.kind == "alltoall":
            to_ranks, of_ranks = carry.to_ranks(self.rank), carry.of_ranks(self.rank)
            return self.all_to_all(carry.words, to_ranks, of_ranks)
        return self.sum(carry.words), carry.words

    def result(self, work: dist.Work, output: torch.Tensor) -> torch.Tensor:
        """Wait for a collective; return its result."""
        with self.waiting():
            work.wait()
        if output.is_cuda:  # allocated on the stream of the backward pass, read on this one
            output.record_stream(torch.cuda.current_stream(output.device))
        return output


class HookedModel:
    """Finds which of the DDP models with a state's hook is running the current pass.

    Usually there is one. There are several if a model is wrapped again while the old DDP is still
    referenced, e.g. by a caught exception, or if models alternate. There is none if the hook is not
    called by DDP.
    """

    def __init__(self) -> None:
        self._model: weakref.ref[DistributedDataParallel] | None = None
        # By the address of their first bucket, which identifies a pass.
        self._known: dict[int | None, weakref.ref[DistributedDataParallel] | None] = {}
        # For each model, its number of addresses so far, and the number of the last search.
        self._places: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[int, int]]
        self._places = weakref.WeakKeyDictionary()
        self._searches = 0

    def find(self, state: Any, bucket: dist.GradBucket) -> bool:
        """Find the model by the first bucket of a pass; return whether this is its first bucket."""
        # These have a new address every time: sparse gradients, and the zeros of a joined rank.
        moves = bucket.buffer().is_sparse or torch._C._current_graph_task_id() < 0
        place = None if moves else bucket.buffer().data_ptr()
        if place in self._known:
            self._model = self._known[place]
            if self._model is None or self._alive() is not None:
                return False
        models = [
            model
            for model in live_objects(DistributedDataParallel)
            if any(hooked is state for _, hooked in vars(model).get("_comm_hooks", ()))
        ]
        first = bucket.parameters()[0]
        models.sort(
            key=lambda m: (all(p is not first for p in m.module.parameters()), self._order(m))
        )
        self._model = weakref.ref(models[0]) if models else None
        self._known = {
            at: known
            for at, known in self._known.items()
            if known and known() not in (None, *models[:1])
        }
        self._known[place] = self._model
        if not models:
            return False
        places, _, _ = self._order(models[0])
        self._searches += 1
        self._places[models[0]] = places + 1, self._searches
        return not places

    def _order(self, model: DistributedDataParallel) -> tuple[int, bool, int]:
        """Sort key to find the model of a new address, the likeliest first.

        A model has two addresses, as DDP rebuilds its buckets once; a model that never ran does not
        call the hook; and of two that alternate, the next one is the other one.
        """
        places, search = self._places.get(model, (0, 0))
        return places, not getattr(model, "_lazy_init_ran", True), search

    def group(self, group: Any) -> Any:
        """Return the process group to use: `group`, which the state was given, or the model's.

        Raises CompressError if `group` has other ranks than the model's.
        """
        if (model := self._alive()) is None:
            return group
        ddp_group = model.process_group
        if group is None or group is ddp_group:
            return ddp_group
        if (ranks := _ranks(group)) != (ddp_ranks := _ranks(ddp_group)):
            raise CompressError(
                f"CompressionState has the process_group of ranks {ranks}, and its hook is on a "
                f"DistributedDataParallel of ranks {ddp_ranks}; expected the same. Leave "
                "process_group out, or pass process_group=ddp.process_group."
            )
        return group

    def check_join(self) -> None:
        """Raise CompressError in a Join that divides by the number of ranks not joined yet."""
        model = self._alive()
        if model is None or not model._join_config.enable:
            return
        if not getattr(model, "_divide_by_initial_world_size", True):
            raise CompressError(
                "Join got divide_by_initial_world_size=False, and a hook does not know how many "
                "ranks have not joined; expected True, which counts all ranks, joined ones with "
                "zero gradients. Leave it out, or train without this hook."
            )

    def _alive(self) -> DistributedDataParallel | None:
        return None if self._model is None else self._model()

    @property
    def drops_unused(self) -> bool:
        """Whether DDP discards the mean of a parameter that no rank has used."""
        model = self._alive()
        # With a static graph DDP detects unused parameters by itself.
        return model is not None and bool(model.find_unused_parameters or model.static_graph)

    @property
    def static(self) -> bool:
        """Whether the model was wrapped with static_graph=True."""
        model = self._alive()
        return model is not None and bool(model.static_graph)

    def trained(self) -> list[tuple[torch.Tensor, str]] | None:
        """Return parameters that require gradients now and that DDP averages; None: no model."""
        if (model := self._alive()) is None:
            return None
        return [
            (parameter, name)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]


def _ranks(group: Any) -> list[int]:
    return sorted(dist.get_process_group_ranks(group or dist.group.WORLD))


class CallWatch:
    """Counts steps of the optimizers of some parameters between calls of the hook.

    Parameters
    ----------
    after : number of steps without a call before an UncalledWarning, given once; 0 for never
    known : returns the parameters and names, as Names.known; if empty, every optimizer counts
    ended : called after each optimizer step that is not nested in another; may be None

    Attributes
    ----------
    steps : number of steps since the hook was last called
    any_step : whether there was any step (parameters may also be updated by hand)

    Raises CompressError if `after` is not a number of steps.
    """

    def __init__(
        self,
        after: int,
        known: Callable[[], list[tuple[torch.Tensor, str]]],
        ended: Callable[[], None] | None,
    ) -> None:
        if not isinstance(after, int) or isinstance(after, bool) or after < 0:
            raise CompressError(
                f"warn_after={after!r}; expected a whole number of steps, 0 for never. Leave it "
                "out for 20."
            )
        self.after, self.steps, self._known = after, 0, known
        self.any_step = False
        self._ended = ended and weakref.WeakMethod(ended)
        self._parameters: set[int] = set()
        # The optimizer whose step is running, the outermost if nested; see `_running`.
        self._stepping: Any = None
        self._passes = 0  # backward passes in that step
        watch_optimizers(self)

    def called(self) -> None:
        """Note that the hook was called."""
        self.steps = 0

    def begin_pass(self) -> None:
        """Begin a backward pass; CompressError if it is the second one within an optimizer step."""
        optimizer = self._running()
        self._passes += 1
        if optimizer is not None and self._passes > 1:
            kind = type(optimizer).__qualname__
            raise CompressError(
                f"{kind} evaluates its closure several times in one step, and compares the "
                "gradients; compressed ones include what earlier evaluations left out. Expected "
                f"one evaluation a step. Train with {kind} uncompressed, or take an optimizer "
                "that evaluates once, such as SGD or AdamW."
            )

    def begin_step(self, optimizer: Any) -> None:
        """See watch_optimizers; steps may be nested, e.g. in ZeroRedundancyOptimizer."""
        if self._mine(optimizer) and self._running() in (None, optimizer):
            self._stepping, self._passes = weakref.ref(optimizer), 0

    def end_step(self, optimizer: Any) -> None:
        """See watch_optimizers; warns after too many steps without a call of the hook."""
        if not self._mine(optimizer):
            return
        self.any_step = True
        outer = self._stepping and self._stepping()
        if outer in (None, optimizer):
            self._stepping = None
            if (ended := self._ended and self._ended()) is not None:
                ended()
        self.steps += 1
        if self.steps == self.after:
            self.after = 0  # once
            warnings.warn(
                f"the optimizer made {self.steps} steps in which nothing called the hook of this "
                "CompressionState; expected a call in every backward pass. Gradients travel "
                "uncompressed, or not at all. Register it: "
                "ddp.register_comm_hook(state, compression_hook), and call ddp, not the model "
                "inside. Lightning's DDPStrategy ignores ddp_comm_hook on a CPU: use "
                "sn_compress.torch.integrations.LightningCompression. For long no_sync() set "
                "warn_after.",
                UncalledWarning,
                stacklevel=4,  # past our hook and torch's wrapper, where the step is called
            )

    @torch.compiler.disable  # a compiled optimizer step calls the hooks that call this
    def _running(self) -> Any:
        """Return the optimizer whose step is running; None if it has ended with an exception.

        torch does not report that, so this checks whether any thread is still in the step (on a GPU
        the backward pass runs on a thread of its own).
        """
        optimizer = self._stepping and self._stepping()
        if optimizer is None:
            return None
        frames = sys._current_frames()
        # Not this frame, which would reference itself.
        frames[threading.get_ident()] = sys._getframe(1)
        for top in frames.values():
            frame: FrameType | None = top
            while frame is not None:
                # Only torch's wrapper around every step, which calls the hooks: reading the locals
                # of any other frame would keep them alive.
                is_step = frame.f_code.co_filename == _STEPS_FILE
                if is_step and frame.f_locals.get("self") is optimizer:
                    return optimizer
                frame = frame.f_back
        self._stepping = None
        return None

    def _mine(self, optimizer: Any) -> bool:
        if not self._parameters:
            self._parameters = {id(parameter) for parameter, _ in self._known()}
        if not self._parameters:
            return True
        return any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"])
