"""Messages between partners for torch: Horovod's alltoall, or torch.distributed point to point.

Horovod has no send and receive. Its alltoall with splits that are zero but for one partner moves
the same bytes; all ranks agree on it first, so one that is late holds up all. Process sets of two
would make one communicator per pair, and cannot do what is not a pair. torch.distributed sends and
receives, and asks nobody but the partner.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch

from ...consistency import WAIT_S, result_of, waited_message
from ...errors import CompressError
from ...gossip.settings import message_prefix
from ...gossip.topology import Partner

Wait = Callable[[], Any]
_taken: WeakSet[Any] = WeakSet()  # groups that carry somebody's messages


@runtime_checkable
class Peers(Protocol):
    """All ranks of a run, seen from one. Every rank makes the same calls in the same order."""

    rank: int
    ranks: int

    def prefix(self, kind: str) -> str:
        """What one object's message names begin with: the same on all ranks, and no other's."""

    def exchange(self, name: str, wire: Any, partner: Partner) -> Wait:
        """Start sending [m] uint8 to a target; the function returned waits for the source's."""

    def sum(self, name: str, tensor: Any) -> Wait:
        """Start a sum over the ranks; the function returned waits for it."""

    def broadcast(self, name: str, tensor: Any, root: int) -> None:
        """Set a tensor, in place, to its values on rank `root`."""


class HorovodPeers:
    """The ranks of a process set of Horovod."""

    def __init__(self, process_set: Any = None, *, wait_s: float = WAIT_S) -> None:
        import horovod.torch as hvd

        self._hvd, self._wait_s = hvd, wait_s
        self._set = hvd.global_process_set if process_set is None else process_set
        if not self._set.included():
            raise CompressError(
                f"this rank is not in {self._set}; expected a process set that has it. Make the "
                "GossipOptimizer on the ranks of the set only."
            )
        self.rank, self.ranks = self._set.rank(), self._set.size()

    def prefix(self, kind: str) -> str:
        """See Peers."""
        return message_prefix(kind, self._set)

    def exchange(self, name: str, wire: Any, partner: Partner) -> Wait:
        """See Peers. A rank that sits out takes part, with nothing."""
        splits = torch.zeros(self.ranks, dtype=torch.int32)
        if partner.target != self.rank:
            splits[partner.target] = wire.numel()
        else:
            wire = wire[:0]
        if wire.numel() >= 2**31:
            raise CompressError(
                f"{name} has {wire.numel()} bytes; Horovod's alltoall counts up to 2**31 - 1. "
                "A tensor that large needs transport over torch.distributed."
            )
        handle = self._hvd.alltoall_async(wire, splits, name=name, process_set=self._set)
        return lambda: self._result(handle, name)[0]

    def sum(self, name: str, tensor: Any) -> Wait:
        """See Peers."""
        handle = self._hvd.allreduce_async(
            tensor, name=name, op=self._hvd.Sum, process_set=self._set
        )
        return lambda: self._result(handle, name)

    def broadcast(self, name: str, tensor: Any, root: int) -> None:
        """See Peers."""
        root = self._set.ranks[root] if self._set.ranks is not None else root
        handle = self._hvd.broadcast_async_(
            tensor, root_rank=root, name=name, process_set=self._set
        )
        self._result(handle, name)

    def _result(self, handle: int, name: str) -> Any:
        return result_of(self._hvd, handle, limit_s=self._wait_s, what=name)


class GroupPeers:
    """The ranks of a group of torch.distributed.

    group : None or one of all ranks: messages get a new group. One of fewer ranks carries them
        itself, and nothing else

    torch.distributed tells messages apart by their order alone: a second optimizer in the same
    group could receive, or wait for ever for, what the first has under way. For fewer than all
    ranks no group can be created here: torch names it by how many groups a rank is in, which need
    not be equal on all of its ranks, and then they never meet.

    Raises CompressError if another object sends over the group already.
    """

    def __init__(self, group: Any = None, *, wait_s: float = WAIT_S) -> None:
        import torch.distributed as dist

        self._dist, self._wait_s = dist, wait_s
        if group is None or dist.get_world_size(group) == dist.get_world_size():
            with self._limit("a group of their own"):
                self._group = dist.new_group(
                    backend=None if group is None else dist.get_backend(group),
                    timeout=timedelta(seconds=wait_s),
                )
        elif group in _taken:
            raise CompressError(
                f"the group of ranks {dist.get_process_group_ranks(group)} carries the messages of "
                "another gossip optimizer or loader; expected one for each. Make another, on all "
                "ranks: torch.distributed.new_group(ranks)."
            )
        else:
            _taken.add(group)
            self._group = group
        self.rank, self.ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        # NCCL makes a group's communicator at its first use, which must have all ranks in it.
        with self._limit("a barrier of their group"):
            dist.barrier(self._group)

    @contextmanager
    def _limit(self, what: str) -> Iterator[None]:
        """CompressError, which says what was waited for, where torch says that it timed out."""
        try:
            yield
        except RuntimeError as error:
            # torch has no type for it, and its back ends have words of their own each.
            if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
                raise
            raise CompressError(waited_message(what, self._wait_s)) from error

    def prefix(self, kind: str) -> str:
        """See Peers. No other object sends over the group, so names tell nothing."""
        return kind

    def exchange(self, name: str, wire: Any, partner: Partner) -> Wait:
        """See Peers. Both directions in one batch, or NCCL could wait for ever."""
        if partner.target == self.rank:
            return lambda: wire[:0]
        dist, device = self._dist, wire.device
        if self._group._get_backend(device).name() == "gloo":
            wire = wire.cpu()  # Gloo reduces tensors of a GPU, and sends those of the host only
        received = torch.empty_like(wire)
        source, target = (
            dist.get_global_rank(self._group, r) for r in (partner.source, partner.target)
        )
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, wire, target, self._group),
                dist.P2POp(dist.irecv, received, source, self._group),
            ]
        )

        def wait() -> Any:
            with self._limit(name):
                for work in works:
                    work.wait()
            return received.to(device)

        return wait

    def sum(self, name: str, tensor: Any) -> Wait:
        """See Peers."""
        total = tensor.clone()
        work = self._dist.all_reduce(total, group=self._group, async_op=True)

        def wait() -> Any:
            with self._limit(name):
                work.wait()
            return total

        return wait

    def broadcast(self, name: str, tensor: Any, root: int) -> None:
        """See Peers."""
        root = self._dist.get_global_rank(self._group, root)
        with self._limit(name):
            self._dist.broadcast(tensor, root, group=self._group)


def find_peers(process_set: Any, group: Any, *, wait_s: float = WAIT_S) -> Peers:
    """The peers of a process set or group, else of all ranks of what has been initialised.

    Raises CompressError if that is neither Horovod nor torch.distributed, or both.
    """
    if isinstance(group, Peers):
        return group
    if process_set is not None and group is not None:
        raise CompressError("got process_set and group; expected one: Horovod's, or torch's")
    # Not imported here: who uses the one need not have the other.
    hvd = sys.modules.get("horovod.torch")
    horovod = hvd is not None and hvd.is_initialized()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if process_set is not None or (group is None and horovod and not distributed):
        return HorovodPeers(process_set, wait_s=wait_s)
    if group is not None or (distributed and not horovod):
        return GroupPeers(group, wait_s=wait_s)
    raise CompressError(
        f"{'both' if horovod else 'neither'} of Horovod and torch.distributed initialised; "
        "expected one. Call hvd.init() or dist.init_process_group() first, or pass process_set= or "
        "group=."
    )
