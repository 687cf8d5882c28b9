"""A process group's collectives, started and waited for; the DDP model of a hook; optimizer steps.

register_comm_hook tells the state nothing, and a bucket knows no model. So `HookedModel` searches
for the model when a pass begins with a bucket that is new: it is alive, as it calls.

A hook that was never registered, or that a strategy ignores, leaves no trace: training goes on with
plain gradients. Only the optimizer's steps are sure to come, so `CallWatch` counts those. After one
that followed an exchange the parameters are equal on all ranks; in a backward pass they need not
be.
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

# torch 2.13 gave them other names, and warns under the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_STEPS_FILE = Optimizer.profile_hook_step.__code__.co_filename


class Collectives:
    """Those of one process group, None for the default one; CompressError for what is no group."""

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
        """How many take part."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return dist.get_rank(self.group)

    def sum(self, tensor: torch.Tensor) -> dist.Work:
        """Start to sum a tensor over the ranks, in place."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def gather(
        self, words: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> tuple[dist.Work, torch.Tensor]:
        """Start to gather the ranks' words, one after another; sizes : of each rank, if unequal."""
        if sizes is None or len(set(sizes)) == 1:
            gathered = words.new_empty(self.ranks * words.numel())
            return all_gather(gathered, words, group=self.group, async_op=True), gathered
        # No backend gathers vectors of several lengths into one; as many bytes travel this way.
        return self.all_to_all(words.repeat(self.ranks), [words.numel()] * self.ranks, sizes)

    def all_to_all(
        self,
        words: torch.Tensor,
        to_ranks: Sequence[int],
        of_ranks: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> tuple[dist.Work, torch.Tensor]:
        """Start to send each rank its words; they are received in `into`, or a new tensor."""
        output = words.new_empty(sum(of_ranks)) if into is None else into
        work = dist.all_to_all_single(
            output, words, list(of_ranks), list(to_ranks), group=self.group, async_op=True
        )
        return work, output

    def total(self, words: npt.NDArray[Any], device: torch.device) -> npt.NDArray[Any]:
        """The sum over the ranks of an array, by way of this device; blocks."""
        total = torch.from_numpy(words.copy()).to(device)  # a copy, as it is summed in place
        with self.waiting():
            self.sum(total).wait()
        return np.asarray(total.cpu().numpy())

    def averages(
        self, views: Sequence[torch.Tensor], packed: torch.Tensor | None
    ) -> Generator[None, None, None]:
        """Average vectors of one dtype in place: yields when the sum has begun, then waits for it.

        packed : the vector that they are all of, where there is one
        """
        together = torch.cat(list(views)) if packed is None else packed
        together.div_(self.ranks)  # before the sum, which half precision might not hold
        work = self.sum(together)
        yield
        with self.waiting():
            work.wait()
        if packed is None:
            means = together.split([view.numel() for view in views])
            for view, mean in zip(views, means, strict=True):
                view.copy_(mean)

    def begin(self, carry: Collective) -> tuple[dist.Work, torch.Tensor]:
        """Start a collective that the engine asks for; return the arguments of `result`."""
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
        if output.is_cuda:  # made on the stream of the backward pass, read on this one
            output.record_stream(torch.cuda.current_stream(output.device))
        return output


class HookedModel:
    """The model whose pass this is, of those that one state's hook is on; mostly there is one.

    There are several where a model is wrapped anew while something holds the old DDP, as a caught
    exception does, or where models take turns. None where something else than DDP calls the hook.
    """

    def __init__(self) -> None:
        self._model: weakref.ref[DistributedDataParallel] | None = None
        # By the place of their first bucket, which a pass that adds to that bucket is known by.
        self._known: dict[int | None, weakref.ref[DistributedDataParallel] | None] = {}
        # How many places each had so far, and after how many searches the last one.
        self._places: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[int, int]]
        self._places = weakref.WeakKeyDictionary()
        self._searches = 0

    def find(self, state: Any, bucket: dist.GradBucket) -> bool:
        """Find the model, by the first bucket of a pass; return whether it had none before."""
        # In another place each time: a sparse gradient, and the zeros of a rank that has joined.
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
        its = bucket.parameters()[0]
        models.sort(
            key=lambda m: (all(p is not its for p in m.module.parameters()), self._order(m))
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
        """By which to look for the model of a new place, the likeliest first.

        Each has two places, as DDP makes new buckets once; one that never ran calls no hook; and of
        two that take turns it is the other one.
        """
        places, search = self._places.get(model, (0, 0))
        return places, not getattr(model, "_lazy_init_ran", True), search

    def group(self, group: Any) -> Any:
        """The process group to use: the state's own, which is passed, or the model's.

        Raises CompressError for a group of other ranks than the model's.
        """
        if (model := self._alive()) is None:
            return group
        theirs = model.process_group
        if group is None or group is theirs:
            return theirs
        if (ours := _ranks(group)) != (ddp := _ranks(theirs)):
            raise CompressError(
                f"CompressionState has the process_group of ranks {ours}, and its hook is on a "
                f"DistributedDataParallel of ranks {ddp}; expected the same. Leave "
                "process_group out, or pass process_group=ddp.process_group."
            )
        return group

    def check_join(self) -> None:
        """CompressError in a Join that divides by the ranks that have not joined."""
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
        """Whether DDP writes no mean of a gradient that no rank has used."""
        model = self._alive()
        # With a static graph DDP looks for unused parameters by itself.
        return model is not None and bool(model.find_unused_parameters or model.static_graph)

    @property
    def static(self) -> bool:
        """Whether its graph was said to be static."""
        model = self._alive()
        return model is not None and bool(model.static_graph)

    def trained(self) -> list[tuple[torch.Tensor, str]] | None:
        """Parameters that require gradients now, but for those DDP ignores; None: no model."""
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
    """Steps of the optimizers of some parameters, and calls of the hook between them.

    Parameters
    ----------
    after : steps without a call after which an UncalledWarning says so, once; 0 for never
    known : the parameters' names, as Names has them; where there are none, every optimizer counts
    ended : called when an optimizer's step has ended, which is in no other's; None for nobody

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
        # The optimizer in whose step this is, of several the outer one; see `_running`.
        self._stepping: Any = None
        self._passes = 0  # in that step
        watch_optimizers(self)

    def called(self) -> None:
        """The hook was called."""
        self.steps = 0

    def begin_pass(self) -> None:
        """A backward pass begins; CompressError if it is the second one in an optimizer's step."""
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
        """See watch_optimizers; a step may have another optimizer's step in it, as ZeRO's has."""
        if self._mine(optimizer) and self._running() in (None, optimizer):
            self._stepping, self._passes = weakref.ref(optimizer), 0

    def end_step(self, optimizer: Any) -> None:
        """See watch_optimizers; warns if that is one step too many without the hook."""
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

    @torch.compiler.disable  # a compiled step calls what begins and ends it
    def _running(self) -> Any:
        """The optimizer in whose step this is; None where its step has ended with an exception.

        torch says nothing of such an end, so this looks whether somebody still is in the step: on
        any thread, as the backward pass of a GPU has one of its own.
        """
        optimizer = self._stepping and self._stepping()
        if optimizer is None:
            return None
        frames = sys._current_frames()
        frames[threading.get_ident()] = sys._getframe(1)  # not this one, which would hold itself
        for frame in frames.values():
            at: FrameType | None = frame
            while at is not None:
                # Of torch's wrapper around every step, which calls the hooks: to read the locals
                # of any other would hold them.
                is_step = at.f_code.co_filename == _STEPS_FILE
                if is_step and at.f_locals.get("self") is optimizer:
                    return optimizer
                at = at.f_back
        self._stepping = None
        return None

    def _mine(self, optimizer: Any) -> bool:
        if not self._parameters:
            self._parameters = {id(parameter) for parameter, _ in self._known()}
        if not self._parameters:
            return True
        return any(id(p) in self._parameters for g in optimizer.param_groups for p in g["params"])
