"""ring_shuffle for torch: a data set that passes each used batch on to the next rank.

loader = DataLoader(ring_shuffle(images, labels, batch_size=64), batch_size=None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...errors import CompressError
from ...gossip.ring import Ring
from ...gossip.topology import Partner
from ...saved import held, reading
from .peers import find_peers


class RingShuffle(IterableDataset):  # type: ignore[misc]
    """The data set that ring_shuffle returns."""

    def __init__(self, ring: Ring, peers: Any, name: str) -> None:
        super().__init__()
        self.ring, self._peers, self._name = ring, peers, name
        after, before = (peers.rank + 1) % peers.ranks, (peers.rank - 1) % peers.ranks
        self._partner = Partner(source=before, target=after, weight=1.0)

    def __len__(self) -> int:
        return self.ring.steps

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if get_worker_info() is not None:
            raise CompressError(
                "ring_shuffle is used in a DataLoader worker, which cannot communicate with other "
                "ranks; expected num_workers=0. The samples are in memory already."
            )
        for batch in self.ring.epoch_of(self._send):
            yield tuple(torch.from_numpy(field) for field in batch)

    def _send(self, step: int, wire: Any) -> Callable[[], Any]:
        if self._peers.ranks == 1:
            return lambda: wire
        name = f"{self._name}.{step % 2}"  # the previous message may still be in flight
        wait = self._peers.exchange(name, torch.from_numpy(wire), self._partner)
        return lambda: wait().numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return shard and epoch, for torch.save."""
        state = self.ring.state_dict()
        return state | {"fields": [torch.from_numpy(field) for field in state["fields"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict returned."""
        with reading("the saved shard"):
            held(state)
            fields = [field.cpu().numpy() for field in state["fields"]]
            self.ring.load_state_dict(state | {"fields": fields})


def ring_shuffle(
    *tensors: Any, batch_size: int, seed: int = 0, process_set: Any = None, group: Any = None
) -> RingShuffle:
    """Return a data set of this rank's shard that passes each used batch on to the next rank.

    Parameters
    ----------
    tensors : this rank's samples along the first axis; copied to the host. Shards may differ a
        little in size: all ranks have the same number of batches, of up to batch_size samples
    seed : of the order within each epoch
    process_set, group : as in GossipOptimizer

    Returns an IterableDataset of batches, for DataLoader(..., batch_size=None, num_workers=0) or
    direct iteration. All ranks must iterate in the same way; an epoch that all ranks abandon at the
    same step leaves the shards unchanged.
    """
    peers = find_peers(process_set, group)
    fields = [torch.as_tensor(tensor).detach().cpu().numpy() for tensor in tensors]
    name = peers.prefix("ring")
    counts = torch.zeros(peers.ranks, dtype=torch.float64)
    counts[peers.rank] = len(fields[0]) if fields else 0
    total = [int(count) for count in peers.sum(f"{name}.counts", counts)().tolist()]
    ring = Ring(fields, counts=total, rank=peers.rank, batch_size=batch_size, seed=seed)
    return RingShuffle(ring, peers, name)
