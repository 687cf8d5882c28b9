"""GossipOptimizer for torch: each rank averages with one other per step.

    optimizer = GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

The obvious way is to average gradients with a partner, as torchdistx did: then the weights random-
walk apart. The other obvious way is to average own new with the partner's old weights: that halves
the learning rate. Here weights are averaged, both from after the step or, with overlap, both from
before it (Lian et al. 2017):

    overlap=False   w <- mix(w_i - u_i, w_j - u_j)
    overlap=True    w <- mix(w_i, w_j) - u_i          sent while the next gradient is computed

Both are applied as a difference, w + weight * (received - sent), so the mean over the ranks is what
it would have been, whatever the optimizer makes of w in between.

One file of this length: the rules for weights and gradients share buckets, messages and the state
of a step.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..contract import Codec
from ..errors import CompressError
from .differences import PULL, Differences, Shape
from .loaders.torch import ring_shuffle
from .peers.torch import Peers, Wait, find_peers
from .topology import Topology
from .topology import topology as make_topology

__all__ = ["GossipOptimizer", "ring_shuffle"]

BUCKET_BYTES = 4 * 2**20
_numbers = itertools.count()  # optimizers are made in the same order on all ranks
_FORMAT = 1


@dataclass
class _Bucket:
    """Tensors of one type that travel in one message."""

    name: str
    tensors: list[Any]
    copies: Differences | None = None
    sent: Any = None  # [n], what the partner will take this rank's values for
    wait: Wait | None = None
    arrived: Any = None  # [n], what this rank takes the partner's values for

    def flat(self) -> Any:
        """The values of all tensors, [n], copied."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])

    def add(self, delta: Any) -> None:
        """Add [n] float32 or wider to the tensors."""
        pieces = delta.split([tensor.numel() for tensor in self.tensors])
        with torch.no_grad():
            for tensor, piece in zip(self.tensors, pieces, strict=True):
                # In half precision the sum is rounded once, not the difference as well.
                tensor.copy_(tensor.to(piece.dtype) + piece.view(tensor.shape))

    def put(self, values: Any) -> None:
        """Set the tensors to [n]."""
        pieces = values.split([tensor.numel() for tensor in self.tensors])
        with torch.no_grad():
            for tensor, piece in zip(self.tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


class Gossip:
    """The state of one GossipOptimizer: whose turn it is, and what is on its way."""

    def __init__(
        self,
        optimizer: Any,
        peers: Peers,
        *,
        topology: Topology,
        average: str,
        momentum: int,
        overlap: bool,
        codec: Codec | Callable[[Shape], Codec] | None,
        pull: float,
        limit: float | None,
        every: int,
        bucket_bytes: int,
    ) -> None:
        self.optimizer, self.peers, self.topology = optimizer, peers, topology
        self.average, self.momentum, self.overlap = average, momentum, overlap
        self.pull, self.limit, self.every = pull if codec else 1.0, limit, every
        self.steps = self.sent_bytes = self.turns = self.averages = 0
        self.spread: float | None = None
        self._measured: Wait | None = None
        self._agreed = False
        self._bucket_bytes = bucket_bytes
        self._prefix = f"gossip.{next(_numbers)}"
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in parameters if p.requires_grad]
        self.buckets = self._split(self.parameters[::-1], "w")
        if codec is not None:
            for bucket in self.buckets:
                shapes = [tuple(tensor.shape) for tensor in bucket.tensors]
                bucket.copies = Differences(shapes, codec)
        self._moving = self.buckets  # those of the step under way
        if average == "gradients":
            self._missing = [len(bucket.tensors) for bucket in self.buckets]
            self._next = 0  # bucket to be sent: in the same order on all ranks
            for number, bucket in enumerate(self.buckets):
                for parameter in bucket.tensors:
                    parameter.register_post_accumulate_grad_hook(self._hook(number))
        for bucket in self.buckets:
            values = bucket.flat()
            # As bytes: Horovod knows no bfloat16.
            peers.broadcast(f"{self._prefix}.start.{bucket.name}", values.view(torch.uint8), 0)
            bucket.put(values)

    def _split(self, tensors: Iterable[Any], kind: str) -> list[_Bucket]:
        """Buckets of up to bucket_bytes, each of one dtype and device, in order."""
        found: list[_Bucket] = []
        open_: dict[Any, tuple[_Bucket, int]] = {}
        for tensor in tensors:
            key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
            bucket, taken = open_.get(key, (None, 0))
            if bucket is None or taken + size > self._bucket_bytes:
                bucket, taken = _Bucket(f"{kind}{len(found)}", []), 0
                found.append(bucket)
            bucket.tensors.append(tensor)
            open_[key] = bucket, taken + size
        return found

    # A step.

    def step(self, inner: Callable[..., Any], closure: Any) -> Any:
        """One step of the optimizer and of gossip."""
        if not self._agreed:
            self._agree()
        if self.average == "gradients":
            return self._gradient_step(inner, closure)
        average_now = self._over_limit()
        if self.overlap and not self._under_way():
            self._begin_all()
        result = self._inner_step(inner, closure)
        if not self.overlap:
            self._begin_all()
        apart = self._finish_all(again=self.overlap and not average_now)
        self._measure(apart)
        if average_now:
            self.consensus()
        return result

    def _finish_all(self, *, again: bool) -> Any:
        """Mix what has come, and start the next messages: each bucket as soon as it is ready."""
        measured = bool(self.every) and self.steps % self.every == 0
        moving, apart = self._moving, None
        self.steps += 1
        if again:
            self._moving = self._of_step()
        for bucket in moving:
            found = self._finish(bucket, self.steps - 1, measured=measured)
            if bucket in self.buckets and found is not None:
                apart = found if apart is None else apart + found.to(apart)
            if again and bucket in self.buckets:
                self._begin(bucket)
        if again:
            for bucket in self._moving:
                if bucket not in self.buckets:
                    self._begin(bucket)
        return apart

    def _inner_step(self, inner: Callable[..., Any], closure: Any) -> Any:
        """The optimizer's own step, unless a loss scaler found Inf: then others still gossip."""
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is None:
            return inner(closure)
        if self.average == "gradients":
            raise CompressError(
                "average='gradients' with a GradScaler: ranks would mix gradients of different "
                "scales. Average weights, or train in bfloat16."
            )
        if found_inf.item():
            return None
        if (scale := self.optimizer.grad_scale) is not None:
            with torch.no_grad():
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        # The scaler removes both afterwards; optimizers that are not fused want none.
        self.optimizer.grad_scale = self.optimizer.found_inf = None
        return inner(closure)

    def _gradient_step(self, inner: Callable[..., Any], closure: Any) -> Any:
        if closure is not None:
            raise CompressError(
                "average='gradients' with a closure: gradients must be there before step(). Call "
                "backward() before step(), or average weights."
            )
        for bucket in self.buckets[self._next :]:
            self._begin(bucket)
        self._next, self._missing = 0, [len(bucket.tensors) for bucket in self.buckets]
        for bucket in self.buckets:
            self._finish(bucket, self.steps, measured=False)
        result = self._inner_step(inner, None)
        self.steps += 1
        return result

    def _hook(self, number: int) -> Callable[[Any], None]:
        def ready(_: Any) -> None:
            if not self.overlap:
                return
            if not self._agreed:
                self._agree()
            self._missing[number] -= 1
            if self._missing[number] < 0:
                raise CompressError(
                    "a gradient came twice before step(), but it has been sent. With several "
                    "backward passes per step, pass overlap=False."
                )
            while self._next < len(self.buckets) and not self._missing[self._next]:
                self._begin(self.buckets[self._next])
                self._next += 1

        return ready

    # Messages.

    def _under_way(self) -> bool:
        return any(b.wait is not None or b.arrived is not None for b in self._moving)

    def _of_step(self) -> list[_Bucket]:
        """What travels at this step: the weights, and every so often what has their shapes."""
        if not self.momentum or self.steps % self.momentum:
            return self.buckets
        return self.buckets + self._split(self._momenta(), "m")

    def _momenta(self) -> Iterator[Any]:
        """The optimizer's own tensors of the shapes of its parameters, such as momentum."""
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

    def _begin(self, bucket: _Bucket) -> None:
        """Send a bucket to this step's target, to be mixed by `_finish`."""
        partner = self.topology.partner(self.peers.rank, self.steps)
        away = partner.target != self.peers.rank
        if self.average == "gradients":
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
        self.turns += bucket is self.buckets[0]
        bucket.wait = self.peers.exchange(f"{self._prefix}.{bucket.name}", wire, partner)

    def _receive(self, bucket: _Bucket, step: int) -> None:
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

    def _finish(self, bucket: _Bucket, step: int, *, measured: bool) -> Any:
        """Mix in what has come; the squared distance to it if `measured`."""
        self._receive(bucket, step)
        partner = self.topology.partner(self.peers.rank, step)
        sent, arrived = bucket.sent, bucket.arrived
        bucket.sent = bucket.arrived = None
        if partner.source == self.peers.rank:
            return None
        like = bucket.tensors[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        apart = arrived.to(like.device, wide) - sent.to(like.device, wide)
        if self.average == "gradients":
            gradients = _Bucket(bucket.name, [p.grad for p in bucket.tensors])
            gradients.add(partner.weight * apart)
        else:
            bucket.add(partner.weight * self.pull * apart)
        return (apart.double() ** 2).sum() if measured else None

    def _drop(self) -> None:
        """Wait for what is under way, and forget it."""
        for bucket in self._moving:
            if bucket.wait is not None:
                bucket.wait()
            bucket.wait = bucket.sent = bucket.arrived = None
        if self.average == "gradients":
            self._next, self._missing = 0, [len(bucket.tensors) for bucket in self.buckets]

    # Staying together.

    def _agree(self, *, same_weights: bool = True) -> None:
        """Raise CompressError, on every rank, unless all have the same settings and weights."""
        self._agreed = True
        told = hashlib.sha256(
            repr(
                (self.topology, self.average, self.momentum, self.overlap, self.pull, self.limit,
                 self.every, [(b.name, [tuple(t.shape) for t in b.tensors],
                 str(b.tensors[0].dtype), b.copies and b.copies.wire_bytes)
                 for b in self.buckets])
            ).encode()
        )  # fmt: skip
        settings = torch.tensor(list(told.digest()), dtype=torch.float64)
        for bucket in self.buckets:
            told.update(bucket.flat().view(torch.uint8).cpu().numpy().tobytes())
        own = torch.cat([settings, torch.tensor(list(told.digest()), dtype=torch.float64)])
        # Sums of whole numbers below 256 are exact. One that differs shows on some rank at least,
        # and is then told to all.
        total = self.peers.sum(f"{self._prefix}.agree", own)()
        differ = (own * self.peers.ranks != total).view(2, -1).any(1).double()
        differ = self.peers.sum(f"{self._prefix}.differ", differ)()
        if differ[0]:
            raise CompressError(
                "ranks have different settings or parameters; expected the same model and the same "
                "arguments of GossipOptimizer on all of them"
            )
        if differ[1] and same_weights:
            raise CompressError(
                "ranks begin with different weights; expected the same. Load a checkpoint into "
                "all ranks, or call consensus() to begin with their mean."
            )

    def _measure(self, apart: Any) -> None:
        """Start a sum over the ranks of squared distances to partners and of squared norms."""
        if not self.every or (self.steps - 1) % self.every:
            return
        own = torch.zeros(3, dtype=torch.float64)
        if apart is not None:
            own[0], own[1] = apart.item(), 1
        own[2] = sum((p.detach().double() ** 2).sum().item() for p in self.parameters)
        self._measured = self.peers.sum(f"{self._prefix}.spread", own)

    def _over_limit(self) -> bool:
        """Take in the last measure of the spread; whether it is over the limit."""
        if self._measured is None:
            return False
        (apart, count, norm), self._measured = self._measured().tolist(), None
        if count:
            # Two that deviate independently are the square root of 2 times as far apart as each is
            # from the mean.
            mean_norm = norm / self.peers.ranks
            self.spread = math.sqrt(apart / count / 2 / mean_norm) if mean_norm else 0.0
        return self.limit is not None and (self.spread or 0) > self.limit

    def consensus(self, also: Iterable[Any] = ()) -> None:
        """See GossipOptimizer."""
        if not self._agreed:
            self._agree(same_weights=False)
        self._over_limit()  # a measure under way would be of what is no more
        self._drop()
        momenta = list(self._momenta())
        have = torch.tensor([len(momenta), -len(momenta)], dtype=torch.float64)
        agreed = self.peers.sum(f"{self._prefix}.momenta", have)()
        if agreed[0] != self.peers.ranks * have[0]:
            momenta = []  # a rank has not stepped yet, or never used a parameter
        floats = [tensor for tensor in also if tensor.is_floating_point()]
        parts = self._split(momenta, "m") + self._split(floats, "also")
        for bucket in self.buckets + parts:
            flat = bucket.flat()
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
            total = self.peers.sum(f"{self._prefix}.mean.{bucket.name}", wide)()
            bucket.put(total / self.peers.ranks)
            if bucket.copies is not None:
                bucket.copies.restart(None)  # anew, from weights that all have
        self.averages += 1

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """What has to be known to go on bit by bit, beside weights and the optimizer's state."""
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
            "copies": [_as_torch(b.copies.state_dict()) for b in self.buckets if b.copies],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state; None: of an optimizer without gossip, to begin anew."""
        self._drop()
        self._measured = None
        self._agreed = state is not None
        if state is None:
            for bucket in self.buckets:
                if bucket.copies is not None:
                    bucket.copies.restart(None)
            return
        coded = [bucket for bucket in self.buckets if bucket.copies is not None]
        if state.get("format") != _FORMAT or len(state["copies"]) != len(coded):
            raise CompressError(
                f"a state of format {state.get('format')!r} with {len(state['copies'])} copies; "
                f"expected {_FORMAT} with {len(coded)}: one saved by a GossipOptimizer with the "
                "same codec and bucket_bytes"
            )
        self.steps, self.spread = state["steps"], state["spread"]
        partner = self.topology.partner(self.peers.rank, self.steps)
        for bucket, saved in zip(coded, state["copies"], strict=True):
            copies = bucket.copies
            assert copies is not None
            copies.load_state_dict(_as_numpy(saved))
            if state["arrived"]:
                bucket.sent = torch.from_numpy(copies.told(partner.target))
                bucket.arrived = torch.from_numpy(copies.heard(partner.source).copy())


def _as_torch(state: Any) -> Any:
    """Arrays as tensors, for torch.save and torch.load(weights_only=True)."""
    if isinstance(state, dict):
        return {key: _as_torch(value) for key, value in state.items()}
    return torch.from_numpy(state) if hasattr(state, "dtype") else state


def _as_numpy(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _as_numpy(value) for key, value in state.items()}
    return state.cpu().numpy() if torch.is_tensor(state) else state


class _Gossiping:
    """What an optimizer gains; comes before its own class."""

    _sn: Gossip
    # A GradScaler then calls step() even where it found Inf: the partner waits for the weights.
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        return self._sn.step(super().step, closure)  # type: ignore[misc]

    def consensus(self, also: Iterable[Any] = ()) -> None:
        self._sn.consensus(also)

    @property
    def spread(self) -> float | None:
        return self._sn.spread

    def report(self) -> dict[str, float]:
        return {
            "steps": self._sn.steps,
            "bytes_per_step": self._sn.sent_bytes / max(self._sn.turns, 1),
            "averages": self._sn.averages,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"gossip": self._sn.state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = {key: value for key, value in state_dict.items() if key != "gossip"}
        super().load_state_dict(own)  # type: ignore[misc]
        self._sn.load_state_dict(state_dict.get("gossip"))


def GossipOptimizer(  # noqa: N802 - named as Horovod names its own
    optimizer: Any,
    *,
    topology: str | Topology = "dissemination",
    average: Literal["weights", "gradients"] = "weights",
    momentum: int = 0,
    overlap: bool = True,
    codec: Codec | Callable[[Shape], Codec] | None = None,
    pull: float = PULL,
    limit: float | None = None,
    every: int = 10,
    bucket_bytes: int = BUCKET_BYTES,
    process_set: Any = None,
    group: Any = None,
) -> Any:
    """Make an optimizer average with one other rank per step. It is returned, changed.

    All ranks then have the weights of rank 0. Evaluate, and save, what `consensus()` leaves.

    Parameters
    ----------
    optimizer : of torch; it keeps its state, schedulers may be made before or after
    topology : a name (see sn_compress.gossip.topology), or a Topology for as many ranks
    average : "weights" keeps ranks together; "gradients", for comparison, does not
    momentum : 0, or every how many steps the optimizer's own tensors, such as momentum, are
        averaged with the partner's as well; `consensus()` always does
    overlap : True sends weights while the next gradient is computed, or gradients during the
        backward pass
    codec : of differences of weights; or a function from a shape to a codec. Needs two copies of
        the model on the host for each partner
    pull : factor on the mixing weight with a codec, in (0, 1]
    limit : of the spread, above which all ranks take the exact mean; None: never by itself
    every : steps from one measure of the spread to the next, a sum of three numbers; 0: none
    bucket_bytes : largest message, unless a single tensor is larger
    process_set, group : of Horovod or of torch.distributed; None: all ranks of what is initialised.
        A group may also be an object with the methods of peers.torch.Peers

    Returns
    -------
    The optimizer, with in addition
    consensus(also=()) : give all ranks the exact mean of weights and of the optimizer's tensors;
        `also` are other tensors, such as model.buffers(), of which the floats are averaged. On all
        ranks at the same step
    spread : the last measure, or None: root mean square distance to the mean over the norm of the
        weights, as seen by distances between partners
    report() : steps, bytes_per_step this rank sent, averages: how often the exact mean was taken

    Raises CompressError for settings that are not legal, or, at the first step and on every rank,
    not the same everywhere.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, _Gossiping):
        raise CompressError(
            f"got a {type(optimizer).__qualname__}; expected a torch.optim.Optimizer, once"
        )
    if average not in ("weights", "gradients"):
        raise CompressError(f"average={average!r}; expected 'weights' or 'gradients'")
    if average == "gradients" and (codec or momentum or limit is not None):
        raise CompressError(
            "average='gradients' with codec, momentum or limit; these are of weights. Leave them, "
            "or average weights."
        )
    if momentum < 0 or every < 0 or bucket_bytes < 1 or not 0 < pull <= 1:
        raise CompressError(
            f"momentum={momentum}, every={every}, bucket_bytes={bucket_bytes}, pull={pull}; "
            "expected 0 or more, 0 or more, 1 or more and (0, 1]"
        )
    if limit is not None and (not limit > 0 or not every):
        raise CompressError(f"limit={limit}, every={every}; expected both above 0")
    if codec and momentum:
        raise CompressError(
            "codec with momentum: it would travel in full. Leave it to consensus(): momentum=0."
        )
    peers = find_peers(process_set, group)
    graph = make_topology(topology, peers.ranks) if isinstance(topology, str) else topology
    if graph.ranks != peers.ranks:
        raise CompressError(f"{graph!r} for {peers.ranks} ranks; expected one of as many")
    if codec and graph.rotate:
        raise CompressError(
            "codec with a rotating topology: a copy of the model for every other rank, and twice. "
            "Use one that does not rotate."
        )
    own = type(optimizer)
    gossip = Gossip(
        optimizer, peers, topology=graph, average=average, momentum=momentum, overlap=overlap,
        codec=codec, pull=pull, limit=limit, every=every, bucket_bytes=bucket_bytes,
    )  # fmt: skip
    optimizer._sn = gossip
    same_name = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    optimizer.__class__ = type(own.__name__, (_Gossiping, own), same_name)
    return optimizer
