"""What a process group of torch does for a rim: sums and gathers that go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ...base.errors import CompressError
from ...engine.carry import Carry, Rounds

# torch 2.13 gave it another name, and warns under the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """Those of one process group; None is the default group.

    Raises CompressError for what is no group.
    """

    def __init__(self, group: Any) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise CompressError(
                f"CompressionState got a {type(group).__qualname__} as process_group; expected a "
                "group of torch.distributed, or None for all ranks. Name what comes behind it: "
                "named_parameters=..., scaler=..."
            )
        self.group = group
        # Around what waits for the others; a state puts its clock here.
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
        """Begin to sum it over the ranks, in its place."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def gather(
        self, words: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> tuple[dist.Work, torch.Tensor]:
        """Begin to gather the ranks' words, one behind the other; `sizes` if some bring more."""
        if sizes is None or len(set(sizes)) == 1:
            gathered = words.new_empty(self.ranks * words.numel())
            return _all_gather(gathered, words, group=self.group, async_op=True), gathered
        # No backend gathers vectors of several lengths into one; as many bytes travel this way.
        return self._all_to_all(words.repeat(self.ranks), [words.numel()] * self.ranks, sizes)

    def alltoall(self, carry: Carry) -> tuple[dist.Work, torch.Tensor]:
        """Begin to hand each of the others its words; the result is what they have for this."""
        return self._all_to_all(carry.words, carry.to_ranks(self.rank), carry.of_ranks(self.rank))

    def _all_to_all(
        self, words: torch.Tensor, to_ranks: Sequence[int], of_ranks: Sequence[int]
    ) -> tuple[dist.Work, torch.Tensor]:
        came = words.new_empty(sum(of_ranks))
        work = dist.all_to_all_single(
            came, words, list(of_ranks), list(to_ranks), group=self.group, async_op=True
        )
        return work, came

    def total(self, words: npt.NDArray[Any], device: torch.device) -> npt.NDArray[Any]:
        """The sum over the ranks of an array, on this device, at once."""
        total = torch.from_numpy(words.copy()).to(device)
        with self.waiting():
            self.sum(total).wait()
        return np.asarray(total.cpu().numpy())

    def averages(
        self, views: Sequence[torch.Tensor], packed: torch.Tensor | None
    ) -> Generator[None, None, None]:
        """Average vectors of one dtype in place; `packed` is the one that they are all of, if any.

        Comes back when the sum has begun; going on waits for it.
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

    def carry(self, rounds: Rounds) -> Generator[None, None, None]:
        """Do the collectives that the engine asks for; comes back while some are on their way."""
        with torch.no_grad():
            asked = next(rounds, None)
        while asked is not None:
            begun = [self._begin(carry) for carry in asked]
            yield
            for work, result in begun:
                with self.waiting():
                    work.wait()
                if result.is_cuda:  # made on the stream of the backward pass, read on this one
                    result.record_stream(torch.cuda.current_stream(result.device))
            try:
                with torch.no_grad():
                    asked = rounds.send([result for _, result in begun])
            except StopIteration:
                asked = None

    def _begin(self, carry: Carry) -> tuple[dist.Work, torch.Tensor]:
        if carry.kind == "gather":
            return self.gather(carry.words, carry.sizes)
        if carry.kind == "alltoall":
            return self.alltoall(carry)
        return self.sum(carry.words), carry.words
