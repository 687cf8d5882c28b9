"""The rules of sn_compress.torch.gossip: what is mixed with what, and when it is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...base.agreement import plain
from ...base.errors import CompressError
from ...base.saved import count, held, reading
from ...codecs.base import Codec
from ...gossip.differences import Differences, Shape
from ...gossip.topology import Topology
from .buckets import Bucket, split
from .messages import Messages
from .peers import Peers
from .together import Spread, Sums, agree_on_settings, agree_on_weights

_FORMAT = 1


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
        self.every = every
        self.steps = self.turns = self.averages = 0
        self.average_bytes = self._start_bytes = 0
        self._agreed = False
        self._bucket_bytes = bucket_bytes
        self._prefix = peers.prefix("gossip")
        self.messages = Messages(
            peers, topology, prefix=self._prefix, gradients=average == "gradients",
            pull=pull if codec else 1.0,
        )  # fmt: skip
        self.spread = Spread(peers, self._prefix, limit)
        self._sums = Sums(peers, self._prefix)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in parameters if p.requires_grad]
        self.buckets = split(self.parameters[::-1], "w", bucket_bytes)
        if codec is not None:
            for bucket in self.buckets:
                shapes = [tuple(tensor.shape) for tensor in bucket.tensors]
                bucket.copies = Differences(shapes, codec)
        settings = {
            "topology": topology, "average": average, "momentum": momentum, "overlap": overlap,
            "codec": codec if isinstance(codec, Codec) else codec is not None, "pull": pull,
            "limit": limit, "every": every, "bucket_bytes": bucket_bytes,
        }  # fmt: skip
        said = [(f"setting {name}", plain(value)) for name, value in settings.items()]
        agree_on_settings(self._sums, said, self.buckets)
        self._moving = self.buckets  # those of the step under way
        if average == "gradients":
            self._missing = [len(bucket.tensors) for bucket in self.buckets]
            self._next = 0  # bucket to be sent: in the same order on all ranks
            for number, bucket in enumerate(self.buckets):
                for parameter in bucket.tensors:
                    parameter.register_post_accumulate_grad_hook(self._hook(number))
        for bucket in self.buckets:
            values = bucket.flat()
            self._start_bytes += 0 if peers.rank else values.nbytes
            # As bytes: Horovod knows no bfloat16.
            peers.broadcast(f"{self._prefix}.start.{bucket.name}", values.view(torch.uint8), 0)
            bucket.put(values)

    # A step.

    def step(self, inner: Callable[..., Any], closure: Any) -> Any:
        """One step of the optimizer and of gossip."""
        if not self._agreed:
            self._agree()
        if self.average == "gradients":
            return self._gradient_step(inner, closure)
        average_now = self.spread.over_limit()
        if self.overlap and not self._under_way():
            self._begin_all()
        result = self._inner_step(inner, closure)
        if not self.overlap:
            self._begin_all()
        self._finish_all(again=self.overlap and not average_now)
        if self.every and not (self.steps - 1) % self.every:
            self.spread.measure(self.buckets)
        if average_now:
            self.consensus()
        return result

    def _finish_all(self, *, again: bool) -> None:
        """Mix what has come, and start the next messages: each bucket as soon as it is ready."""
        moving = self._moving
        self.steps += 1
        if again:
            self._moving = self._of_step()
        for bucket in moving:
            self.messages.finish(bucket, self.steps - 1)
            if again and bucket in self.buckets:
                self._begin(bucket)
        if again:
            for bucket in self._moving:
                if bucket not in self.buckets:
                    self._begin(bucket)

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
            self.messages.finish(bucket, self.steps)
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

    def _begin(self, bucket: Bucket) -> None:
        self.turns += bucket is self.buckets[0]
        self.messages.begin(bucket, self.steps)

    def _under_way(self) -> bool:
        return any(b.wait is not None or b.arrived is not None for b in self._moving)

    def _of_step(self) -> list[Bucket]:
        """What travels at this step: the weights, and every so often what has their shapes."""
        if not self.momentum or self.steps % self.momentum:
            return self.buckets
        return self.buckets + split(self._momenta(), "m", self._bucket_bytes)

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

    def _drop(self) -> None:
        """Wait for what is under way, and forget it."""
        for bucket in self._moving:
            if bucket.wait is not None:
                bucket.wait()
            bucket.wait = bucket.sent = bucket.arrived = None
        if self.average == "gradients":
            self._next, self._missing = 0, [len(bucket.tensors) for bucket in self.buckets]

    # Staying together.

    def _agree(self) -> None:
        self._agreed = True
        agree_on_weights(self._sums, self.buckets)

    @property
    def other_bytes(self) -> int:
        """What this rank sent beside weights and averages: to begin, to agree, to measure."""
        return self._start_bytes + self._sums.sent_bytes + self.spread.sent_bytes

    def consensus(self, also: Iterable[Any] = ()) -> None:
        """See GossipOptimizer."""
        self._agreed = True  # ranks have the same weights, afterwards
        self.spread.over_limit()  # a measure under way would be of what is no more
        self._drop()
        momenta = list(self._momenta())
        have = torch.tensor([len(momenta), -len(momenta)], dtype=torch.float64)
        agreed = self._sums("momenta", have.numpy())
        if agreed[0] != self.peers.ranks * have[0]:
            momenta = []  # a rank has not stepped yet, or never used a parameter
        floats = [tensor for tensor in also if tensor.is_floating_point()]
        most = self._bucket_bytes
        parts = split(momenta, "m", most) + split(floats, "also", most)
        for bucket in self.buckets + parts:
            flat = bucket.flat()
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
            self.average_bytes += wide.nbytes
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
                self.messages.receive(bucket, self.steps)
        return {
            "format": _FORMAT,
            "steps": self.steps,
            "spread": self.spread.value,
            "arrived": arrived,
            "copies": [_as_torch(b.copies.state_dict()) for b in self.buckets if b.copies],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state; None: of an optimizer without gossip, to begin anew."""
        self.take(self.read(state))

    def read(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """A saved state, checked, for `take`; nothing changes."""
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
                own.read(_as_numpy(saved))
                for own, saved in zip(coded, state["copies"], strict=True)
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
        """Go on with what `read` returned."""
        self._drop()
        self.spread.load(self.spread.value)
        self._agreed = state is not None
        if state is None:
            for bucket in self.buckets:
                if bucket.copies is not None:
                    bucket.copies.restart(None)
            return
        coded = [bucket for bucket in self.buckets if bucket.copies is not None]
        self.steps = state["steps"]
        self.spread.load(state["spread"])
        partner = self.topology.partner(self.peers.rank, self.steps)
        for bucket, saved in zip(coded, state["copies"], strict=True):
            copies = bucket.copies
            assert copies is not None
            copies.take(saved)
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
