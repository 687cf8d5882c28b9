"""A bucket's way: to this step's target, and what comes from the source mixed in."""

from __future__ import annotations

import torch

from ...gossip.topology import Topology
from .buckets import Bucket
from .peers import Peers


class Messages:
    """The messages of one GossipOptimizer.

    Parameters
    ----------
    prefix : of their names
    gradients : whether gradients travel, not weights
    pull : factor on the mixing weight
    """

    def __init__(
        self, peers: Peers, topology: Topology, *, prefix: str, gradients: bool, pull: float
    ) -> None:
        self.peers, self.topology = peers, topology
        self.prefix, self.gradients, self.pull = prefix, gradients, pull
        self.sent_bytes = 0

    def begin(self, bucket: Bucket, step: int) -> None:
        """Send a bucket to the step's target, to be mixed by `finish`."""
        partner = self.topology.partner(self.peers.rank, step)
        away = partner.target != self.peers.rank
        if self.gradients:
            for parameter in bucket.tensors:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            bucket.sent = torch.cat([p.grad.detach().reshape(-1) for p in bucket.tensors])
        else:
            bucket.sent = bucket.flat()
        if bucket.copies is None:
            wire = bucket.sent.view(torch.uint8)
        else:
            values = bucket.sent.to("cpu", torch.float32).numpy()
            if bucket.copies.base is None:
                bucket.copies.restart(values)
            if away:
                packed = bucket.copies.pack(values, partner.target)
                bucket.sent = torch.from_numpy(bucket.copies.told(partner.target))
                wire = torch.from_numpy(packed)
            else:
                wire = torch.empty(0, dtype=torch.uint8)
        self.sent_bytes += wire.numel() if away else 0
        bucket.wait = self.peers.exchange(f"{self.prefix}.{bucket.name}", wire, partner)

    def receive(self, bucket: Bucket, step: int) -> None:
        """Wait for what the source sent for a step."""
        if bucket.wait is None:
            return
        wire, bucket.wait = bucket.wait(), None
        source = self.topology.partner(self.peers.rank, step).source
        if source == self.peers.rank:
            bucket.arrived = bucket.sent
        elif bucket.copies is None:
            bucket.arrived = wire.view(bucket.sent.dtype)
        else:
            bucket.arrived = torch.from_numpy(bucket.copies.unpack(wire.numpy(), source))

    def finish(self, bucket: Bucket, step: int) -> None:
        """Mix in what has come."""
        self.receive(bucket, step)
        partner = self.topology.partner(self.peers.rank, step)
        sent, arrived = bucket.sent, bucket.arrived
        bucket.sent = bucket.arrived = None
        if partner.source == self.peers.rank:
            return
        like = bucket.tensors[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        apart = arrived.to(like.device, wide) - sent.to(like.device, wide)
        if self.gradients:
            gradients = Bucket(bucket.name, [p.grad for p in bucket.tensors])
            gradients.add(partner.weight * apart)
        else:
            bucket.add(partner.weight * self.pull * apart)
