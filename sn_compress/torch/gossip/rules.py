"""The gossip algorithm in torch: what is averaged, and when it is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import __version__
from ...codecs.registry import map_tree
from ...consistency import agree, all_equal, difference, digest_words
from ...errors import CompressError
from ...gossip import differences
from ...gossip.differences import Differences
from ...gossip.settings import GossipSettings
from ...gossip.topology import Partner
from ...saved import count, held, reading
from ..outcomes import digest
from .peers import Peers, Wait

_FORMAT = 1


@dataclass(eq=False)
class Bucket:
    """Tensors of one dtype that share a message, with the copies that a codec needs.

    sent : [n], this rank's values as the target will decode them
    arrived : [n], the source's values as decoded here
    """

    name: str
    tensors: list[Any]
    copies: Differences | None = None
    sent: Any = None
    wait: Wait | None = None
    arrived: Any = None

    def flat(self) -> Any:
        """Return a copy of the values of all tensors, [n]."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])

    def put(self, values: Any, *, add: bool = False) -> None:
        """Set the tensors to [n] values; or add them, in float32 or wider."""
        pieces = values.split([tensor.numel() for tensor in self.tensors])
        with torch.no_grad():
            for tensor, piece in zip(self.tensors, pieces, strict=True):
                new = piece.view(tensor.shape)
                # For half precision, round only the sum, not the difference as well.
                tensor.copy_(tensor.to(piece.dtype) + new if add else new)


def _wide(dtype: Any) -> Any:
    return torch.promote_types(dtype, torch.float32)


def split(tensors: Iterable[Any], kind: str, most_bytes: int) -> list[Bucket]:
    """Divide tensors, in order, into buckets of up to most_bytes of one dtype and device."""
    buckets: list[Bucket] = []
    open_: dict[Any, tuple[Bucket, int]] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        bucket, filled = open_.get(key, (None, 0))
        if bucket is None or filled + size > most_bytes:
            bucket, filled = Bucket(f"{kind}{len(buckets)}", []), 0
            buckets.append(bucket)
        bucket.tensors.append(tensor)
        open_[key] = bucket, filled + size
    return buckets


class Gossip:
    """The state of one GossipOptimizer: its step count and the messages in flight.

    Attributes
    ----------
    turns : number of steps in which messages were sent
    spread : the last measured distance of the ranks from their mean, over the norm of the weights,
        the same on all ranks; None if not measured yet
    sent_bytes, average_bytes, other_bytes : sent by this rank to its partners; for exact averages;
        and to start, agree and measure
    """

    def __init__(
        self, optimizer: Any, peers: Peers, settings: GossipSettings, bucket_bytes: int
    ) -> None:
        self.optimizer, self.peers, self.settings = optimizer, peers, settings
        self.topology = settings.graph(peers.ranks)
        self.steps = self.turns = self.averages = 0
        self.sent_bytes = self.average_bytes = self.other_bytes = 0
        self.spread: float | None = None
        self._measured: Wait | None = None  # the sum of a measurement in flight
        self._agreed = False
        self._bucket_bytes = bucket_bytes
        self._prefix = peers.prefix("gossip")
        self.parameters = self._trained()
        self._known = set(map(id, self.parameters))
        self.buckets = split(self.parameters[::-1], "w", bucket_bytes)
        for bucket in self.buckets:
            bucket.copies = settings.copies([tuple(tensor.shape) for tensor in bucket.tensors])
        self._agree_on_settings()
        self._moving = self.buckets  # buckets sent in the current step
        for bucket in self.buckets:
            values = bucket.flat()
            self.other_bytes += 0 if peers.rank else values.nbytes
            # As bytes: Horovod lacks bfloat16.
            peers.broadcast(f"{self._prefix}.start.{bucket.name}", values.view(torch.uint8), 0)
            bucket.put(values)

    # A step

    @torch.compiler.disable  # an exchange cannot be traced, if optimizer.step is compiled
    def step(self, inner: Callable[..., Any], closure: Any) -> Any:
        """Run one step of the optimizer and of gossip."""
        for parameter in self._trained():
            if id(parameter) not in self._known:
                raise CompressError(
                    f"a parameter of shape {tuple(parameter.shape)} was added to the optimizer, or "
                    "set to require gradients, after GossipOptimizer was made, and would not be "
                    "averaged; expected those it was made with. Make the optimizer, and "
                    "GossipOptimizer of it, again."
                )
        if not self._agreed:
            self._agree_on_weights()
        average_now = self._over_limit()
        overlap, interval = self.settings.overlap, self.settings.every
        if overlap and not self._under_way():
            self._begin_all()
        result = self._inner_step(inner, closure)
        if not overlap:
            self._begin_all()
        self._finish_all(again=overlap and not average_now)
        if interval and not (self.steps - 1) % interval:
            self._measure()
        if average_now:
            self.consensus()
        return result

    def _trained(self) -> list[Any]:
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _finish_all(self, *, again: bool) -> None:
        """Mix in received values; start each bucket's next message as soon as it is mixed."""
        moving = self._moving
        self.steps += 1
        if again:
            self._moving = self._of_step()
        for bucket in moving:
            self._finish(bucket, self.steps - 1)
            if again and bucket in self.buckets:
                self._begin(bucket)
        if again:
            for bucket in self._moving:
                if bucket not in self.buckets:
                    self._begin(bucket)

    def _inner_step(self, inner: Callable[..., Any], closure: Any) -> Any:
        """Step the optimizer unless a loss scaler found Inf; gossip goes on regardless."""
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is None:
            return inner(closure)
        if found_inf.item():
            return None
        # Because of `_step_supports_amp_scaling` the scaler has not unscaled the gradients.
        if (scale := self.optimizer.grad_scale) is not None:
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        # The scaler removes both afterwards; non-fused optimizers do not accept them.
        self.optimizer.grad_scale = self.optimizer.found_inf = None
        return inner(closure)

    # Messages

    def _partner(self, step: int) -> Partner:
        return self.topology.partner(self.peers.rank, step)

    def _begin(self, bucket: Bucket) -> None:
        """Send a bucket to this step's target; `_finish` mixes in what is received."""
        self.turns += bucket is self.buckets[0]
        partner = self._partner(self.steps)
        bucket.sent = bucket.flat()
        if bucket.copies is None:
            wire = bucket.sent.view(torch.uint8)
        else:
            values = bucket.sent.to("cpu", torch.float32).numpy()
            packed, copy = bucket.copies.begin(values, partner.target, self.peers.rank)
            wire, bucket.sent = torch.from_numpy(packed), torch.from_numpy(copy)
        self.sent_bytes += wire.numel() if partner.target != self.peers.rank else 0
        bucket.wait = self.peers.exchange(f"{self._prefix}.{bucket.name}", wire, partner)

    def _receive(self, bucket: Bucket, step: int) -> None:
        """Wait for what the source sent for a step."""
        if bucket.wait is None:
            return
        wire, bucket.wait = bucket.wait(), None
        source = self._partner(step).source
        if source == self.peers.rank:
            bucket.arrived = bucket.sent
        elif bucket.copies is None:
            bucket.arrived = wire.view(bucket.sent.dtype)
        else:
            bucket.arrived = torch.from_numpy(bucket.copies.unpack(wire.numpy(), source))

    def _finish(self, bucket: Bucket, step: int) -> None:
        """Mix in the partner's values."""
        self._receive(bucket, step)
        partner = self._partner(step)
        sent, arrived = bucket.sent, bucket.arrived
        bucket.sent = bucket.arrived = None
        if partner.source == self.peers.rank:
            return
        like = bucket.tensors[0]
        wide = _wide(like.dtype)
        offset = arrived.to(like.device, wide) - sent.to(like.device, wide)
        bucket.put(partner.weight * self.settings.factor * offset, add=True)

    def _under_way(self) -> bool:
        return any(b.wait is not None or b.arrived is not None for b in self._moving)

    def _of_step(self) -> list[Bucket]:
        """Return what is sent at this step: the weights, and at intervals the momenta."""
        if not self.settings.momentum or self.steps % self.settings.momentum:
            return self.buckets
        return self.buckets + split(self._momenta(), "m", self._bucket_bytes)

    def _momenta(self) -> Iterator[Any]:
        """Yield the optimizer's own tensors with the shapes of its parameters, e.g. momentum."""
        for parameter in self.parameters:
            state = self.optimizer.state.get(parameter, {})
            for key in sorted(map(str, state)):
                value = state[key]
                if torch.is_tensor(value) and value.shape == parameter.shape and value.dim():
                    yield value

    def _begin_all(self) -> None:
        self._moving = self._of_step()
        for bucket in self._moving:
            self._begin(bucket)

    def _drop(self) -> None:
        """Wait for messages in flight, and discard them."""
        for bucket in self._moving:
            if bucket.wait is not None:
                bucket.wait()
            bucket.wait = bucket.sent = bucket.arrived = None

    # Staying together

    def _sum(self, name: str, words: Any) -> Any:
        """Sum a few words over the ranks."""
        self.other_bytes += words.nbytes
        wire = torch.from_numpy(words.copy())
        return self.peers.sum(f"{self._prefix}.{name}", wire)().cpu().numpy()

    def _of_tensors(self, what: Callable[[Any], str]) -> list[tuple[str, str]]:
        return [
            (f"tensor {place} of bucket {bucket.name}", what(tensor))
            for bucket in self.buckets
            for place, tensor in enumerate(bucket.tensors)
        ]

    def _agree_on_settings(self) -> None:
        """Raise CompressError on every rank unless all have the same settings and tensors."""
        fingerprint = [
            ("version of sn_compress", __version__),
            *self.settings.fingerprint(self.peers.ranks),
            ("setting bucket_bytes", str(self._bucket_bytes)),
            *self._of_tensors(lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}"),
            *(
                (f"bytes of bucket {bucket.name}", str(bucket.copies and bucket.copies.wire_bytes))
                for bucket in self.buckets
            ),
        ]
        agree(
            fingerprint, total=self._sum, rank=self.peers.rank, ranks=self.peers.ranks,
            name="agree",
            do="Give all ranks the same model, and GossipOptimizer the same arguments.",
        )  # fmt: skip

    def _agree_on_weights(self) -> None:
        """Raise CompressError on every rank unless all have the same weights."""
        self._agreed = True
        fingerprint = self._of_tensors(digest)
        if not all_equal(self._sum("weights", digest_words(fingerprint))):
            differing = difference(
                fingerprint,
                total=self._sum,
                rank=self.peers.rank,
                ranks=self.peers.ranks,
                name="weights",
            )
            raise CompressError(
                f"ranks start with different weights; expected the same; {differing} (digests). "
                "Load a checkpoint into all ranks, or call consensus() to start with their mean."
            )

    def _measure(self) -> None:
        """Start summing the sketches of the ranks' weights; `_over_limit` waits for the sum."""
        parts = [bucket.flat().float() for bucket in self.buckets]
        rows = [differences.rows_of(len(part)) for part in parts]
        signs = torch.from_numpy(differences.signs(sum(rows))).split(rows)
        sketch = torch.zeros(differences.WIDTH + 2, dtype=torch.float64)
        for part, sign in zip(parts, signs, strict=True):
            missing = len(sign) * differences.WIDTH - len(part)
            filled = torch.nn.functional.pad(part, (0, missing)).view(-1, differences.WIDTH)
            sketch[:-2] += (sign.to(part.device) @ filled).double().cpu()
            sketch[-1] += part.norm().item() ** 2
        sketch[-2] = sketch[:-2] @ sketch[:-2]
        self.other_bytes += sketch.nbytes
        self._measured = self.peers.sum(f"{self._prefix}.spread", sketch)

    def _over_limit(self) -> bool:
        """Read the last measurement; return whether it is over the limit."""
        if self._measured is None:
            return False
        total, self._measured = self._measured(), None
        self.spread = differences.spread(total.numpy(), self.peers.ranks)
        limit = self.settings.limit
        return limit is not None and self.spread > limit

    def consensus(self, also: Iterable[Any] = ()) -> None:
        """See GossipOptimizer."""
        self._agreed = True  # ranks will have the same weights
        self._over_limit()  # a measurement in flight is of weights about to be replaced
        self._drop()
        momenta = list(self._momenta())
        # Compare squares as well: one rank's count may happen to equal the mean, and that rank
        # alone would then wait for momenta.
        total, squares = self._sum(
            "momenta", np.array([len(momenta), len(momenta) ** 2], np.float64)
        )
        if self.peers.ranks * squares != total**2:
            momenta = []  # a rank has not stepped yet, or never used a parameter
        floats = [tensor for tensor in also if tensor.is_floating_point()]
        most = self._bucket_bytes
        parts = split(momenta, "m", most) + split(floats, "also", most)
        for bucket in self.buckets + parts:
            flat = bucket.flat()
            wide = flat.to(_wide(flat.dtype))
            self.average_bytes += wide.nbytes
            summed = self.peers.sum(f"{self._prefix}.mean.{bucket.name}", wide)()
            bucket.put(summed / self.peers.ranks)
            if bucket.copies is not None:
                bucket.copies.restart(None)  # from the weights that all ranks now have
        self.averages += 1

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming bit by bit needs besides weights and the optimizer's state."""
        coded = self.buckets[0].copies is not None
        arrived = coded and self._under_way()
        if arrived:  # else the weights are sent again after loading
            for bucket in self._moving:
                self._receive(bucket, self.steps)
        return {
            "format": _FORMAT,
            "steps": self.steps,
            "spread": self.spread,
            "arrived": arrived,
            "copies": [
                map_tree(np.ndarray, torch.from_numpy, bucket.copies.state_dict())
                for bucket in self.buckets
                if bucket.copies
            ],
        }

    def read(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Check a saved state and return it for `take`; None, to start anew, if there is none."""
        if state is None:
            return None
        coded = [bucket.copies for bucket in self.buckets if bucket.copies is not None]
        with reading("the saved state of gossip"):
            held(state)
            if state.get("format") != _FORMAT or len(state["copies"]) != len(coded):
                raise CompressError(
                    f"a state of format {state.get('format')!r} with {len(state['copies'])} "
                    f"copies; expected {_FORMAT} with {len(coded)}: one saved by a GossipOptimizer "
                    "with the same codec and bucket_bytes"
                )
            steps, spread, arrived = state["steps"], state["spread"], state["arrived"]
            if spread is not None and not (isinstance(spread, float) and 0 <= spread < math.inf):
                raise CompressError(f"a saved spread is {spread!r}; expected 0 or more, or None")
            copies = [
                copies_of.read(map_tree(torch.Tensor, lambda tensor: tensor.cpu().numpy(), saved))
                for copies_of, saved in zip(coded, state["copies"], strict=True)
            ]
            if not isinstance(arrived, bool) or (
                arrived and (not coded or any(base is None for base, _, _ in copies))
            ):
                raise CompressError(f"saved messages have arrived: {arrived!r}; expected False")
            return {
                "steps": count(steps, "number of steps"), "spread": spread, "arrived": arrived,
                "copies": copies,
            }  # fmt: skip

    def take(self, state: dict[str, Any] | None) -> None:
        """Continue from what `read` returned."""
        self._drop()
        self._measured = None
        self._agreed = state is not None
        if state is None:
            for bucket in self.buckets:
                if bucket.copies is not None:
                    bucket.copies.restart(None)
            return
        coded = [bucket for bucket in self.buckets if bucket.copies is not None]
        self.steps = state["steps"]
        self.spread = state["spread"]
        partner = self._partner(self.steps)
        for bucket, saved in zip(coded, state["copies"], strict=True):
            copies = bucket.copies
            assert copies is not None
            copies.take(saved)
            if state["arrived"]:
                bucket.sent = torch.from_numpy(copies.sent_to(partner.target))
                # A copy, as the next message changes the original in place.
                bucket.arrived = torch.from_numpy(copies.heard(partner.source).copy())
