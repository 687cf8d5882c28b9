"""Gossip ranks as threads of one process: the optimizer's own code, without a network.

What a rank sends is copied and lies in a queue until the partner takes it; sums are taken in order
of rank. Gossip between two ranks is two messages whatever else goes on, so real ranks get the same
bits (tests/gossip/test_torch.py).
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from sn_compress.gossip import Partner

_PATIENCE_S = 600.0


class Hall:
    """Where the ranks of one run meet."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=_PATIENCE_S)
        self.lock = threading.Lock()
        self.boxes: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)
        self.posted: list[Any] = [None] * ranks

    def box(self, key: Any) -> queue.Queue[Any]:
        """The queue of one kind of message to one rank."""
        with self.lock:
            return self.boxes[key]

    def run(self, work: Callable[[LocalPeers], Any]) -> list[Any]:
        """`work(peers)` for each rank, in a thread of its own; what they return, in order."""
        results: list[Any] = [None] * self.ranks
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            try:
                results[number] = work(LocalPeers(self, number))
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
        if first:
            raise first[0]
        return results


class LocalPeers:
    """sn_compress.torch.gossip.peers.Peers, for one of the threads."""

    def __init__(self, hall: Hall, rank: int) -> None:
        self.hall, self.rank, self.ranks = hall, rank, hall.ranks
        self._made = 0

    def prefix(self, kind: str) -> str:
        """See Peers: every thread counts its own."""
        self._made += 1
        return f"{kind}.{self._made}"

    def exchange(self, name: str, wire: Any, partner: Partner) -> Callable[[], Any]:
        """Post to the target, take from the source."""
        if partner.target == self.rank:
            return lambda: wire[:0]
        self.hall.box((partner.target, self.rank, name)).put(wire.clone())

        def wait() -> Any:
            box = self.hall.box((self.rank, partner.source, name))
            for _ in range(int(_PATIENCE_S)):
                try:
                    return box.get(timeout=1)
                except queue.Empty:
                    if self.hall.barrier.broken:
                        raise threading.BrokenBarrierError from None
            raise TimeoutError(f"nothing from rank {partner.source} in {_PATIENCE_S:g} s")

        return wait

    def sum(self, name: str, tensor: Any) -> Callable[[], Any]:
        """All wait for all."""
        first, *others = self.gather(tensor)
        total = first.clone()
        for other in others:
            total += other
        return lambda: total

    def gather(self, value: Any) -> list[Any]:
        """What all ranks hand over, in order of rank."""
        # Copied, as others still read it when this one has gone on.
        self.hall.posted[self.rank] = copy.deepcopy(value)
        self.hall.barrier.wait()
        posted = list(self.hall.posted)
        self.hall.barrier.wait()
        return posted

    def broadcast(self, name: str, tensor: Any, root: int) -> None:
        """See Peers."""
        self.hall.posted[self.rank] = tensor
        self.hall.barrier.wait()
        if self.rank != root:
            tensor.copy_(self.hall.posted[root])
        self.hall.barrier.wait()
