"""Messages between partners for torch: Horovod's alltoall, or torch.distributed point to point.

Horovod has no send and receive. An alltoall whose splits are zero except for one partner moves the
same bytes, but all ranks negotiate it first, so a late rank delays all. Process sets of two would
need a communicator per pair, and only work if the exchange is in pairs. torch.distributed has send
and receive, which involve only the partner.
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
_taken: WeakSet[Any] = WeakSet()  # groups in use by a gossip optimizer or loader


@runtime_checkable
class Peers(Protocol):
    """All ranks of a run, as seen by one. Every rank makes the same calls in the same order."""

    rank: int
    ranks: int

    def prefix(self, kind: str) -> str:
        """Return a prefix for one object's message names: unique, and the same on all ranks."""

    def exchange(self, name: str, wire: Any, partner: Partner) -> Wait:
        """Start sending [m] uint8 to the target; the result waits for the source's message."""

    def sum(self, name: str, tensor: Any) -> Wait:
        """Start a sum over the ranks; the result waits for it."""

    def broadcast(self, name: str, tensor: Any, root: int) -> None:
        """Set a tensor, in place, to its values on rank `root`."""


class HorovodPeers:
    """The ranks of a Horovod process set."""

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
        """See Peers. An idle rank takes part, with nothing to send."""
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
    """The ranks of a torch.distributed group.

    group : None or a group of all ranks: messages get a new group. A group of fewer ranks carries
        the messages itself, and must carry nothing else

    torch.distributed distinguishes messages only by their order: a second optimizer in the same
    group could receive the first one's messages, or hang. For fewer than all ranks a new group
    cannot be created here: torch names it by the number of groups a rank is in, which may differ
    between its ranks, and then they would never connect.

    Raises CompressError if another object already uses the group.
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
        # NCCL creates a group's communicator on first use, which must involve all its ranks.
        with self._limit("a barrier of their group"):
            dist.barrier(self._group)

    @contextmanager
    def _limit(self, what: str) -> Iterator[None]:
        """Convert torch's timeout errors to a CompressError that says what was waited for."""
        try:
            yield
        except RuntimeError as error:
            # torch has no type for timeouts, and each back end words them differently.
            if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
                raise
            raise CompressError(waited_message(what, self._wait_s)) from error

    def prefix(self, kind: str) -> str:
        """See Peers. No other object uses the group, so names need not be unique."""
        return kind

    def exchange(self, name: str, wire: Any, partner: Partner) -> Wait:
        """See Peers. Both directions in one batch, or NCCL could deadlock."""
        if partner.target == self.rank:
            return lambda: wire[:0]
        dist, device = self._dist, wire.device
        if self._group._get_backend(device).name() == "gloo":
            wire = wire.cpu()  # Gloo can reduce GPU tensors, but sends only CPU tensors
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
    """Return the peers of a process set or group, or all ranks of the library initialised.

    Raises CompressError if neither Horovod nor torch.distributed is initialised, or both are.
    """
    if isinstance(group, Peers):
        return group
    if process_set is not None and group is not None:
        raise CompressError("got process_set and group; expected one: Horovod's, or torch's")
    # Not imported here: users of torch.distributed need not have Horovod.
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
