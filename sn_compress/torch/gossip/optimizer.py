"""GossipOptimizer for torch: each rank averages with one other per step.

    optimizer = GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

Averaging gradients with a partner, as torchdistx did, lets the weights random-walk apart. Averaging
a rank's new weights with its partner's old ones halves the learning rate. Here weights are
averaged, both from after the step or, with overlap, both from before it (Lian et al. 2017):

    overlap=False   w <- mix(w_i - u_i, w_j - u_j)
    overlap=True    w <- mix(w_i, w_j) - u_i          sent while the next gradient is computed

Both are applied as a difference, w + weight * (received - sent), so the mean over the ranks is
preserved, whatever the optimizer does to w in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from ...codecs.base import Codec
from ...errors import CompressError
from ...gossip.differences import PULL, Shape
from ...gossip.settings import GossipSettings
from ...gossip.topology import Topology
from ...saved import held, reading
from .peers import find_peers
from .rules import Gossip

__all__ = ["GossipOptimizer"]

BUCKET_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class _Gossiping:
    """Methods added to an optimizer; the first base of its new class."""

    _sn: Gossip
    # Makes a GradScaler call step() even if it found Inf: the partner waits for the weights.
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
            "average_bytes": self._sn.average_bytes,
            "other_bytes": self._sn.other_bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"gossip": self._sn.state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with reading("the saved state of the optimizer"):
            held(state_dict)  # before torch copies: a file may declare more than it contains
            state = {key: value for key, value in state_dict.items() if key != "gossip"}
            gossip = self._sn.read(state_dict.get("gossip"))
            super().load_state_dict(state)  # type: ignore[misc]
        self._sn.take(gossip)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Partners do not know about copies. Only the state of torch's own optimizer is copied.
        plain = type(self).__bases__[1]
        _log.warning(
            "a copy of this %s is a plain one, which exchanges nothing with other ranks: wrap it "
            "as well",
            plain.__name__,
        )
        return _empty, (plain,), self.__getstate__()


def _empty(cls: Any) -> Any:
    return cls.__new__(cls)


def GossipOptimizer(  # noqa: N802 - named as Horovod names its own
    optimizer: Any,
    *,
    topology: str | Topology = "dissemination",
    momentum: int = 0,
    overlap: bool = True,
    codec: Codec | Callable[[Shape], Codec] | None = None,
    pull: float = PULL,
    limit: float | None = None,
    every: int = 10,
    bucket_bytes: int = BUCKET_BYTES,
    wait_s: float = 1800.0,
    process_set: Any = None,
    group: Any = None,
) -> Any:
    """Make an optimizer average weights with one other rank per step; it is changed and returned.

    All ranks first get the weights of rank 0. Evaluate and save the weights after `consensus()`.

    Parameters
    ----------
    optimizer : torch optimizer; it keeps its state, and schedulers may be created before or after
    topology : a name (see sn_compress.gossip.topology), or a Topology for this number of ranks
    momentum : average the optimizer's own tensors, such as momentum, with the partner's every this
        many steps; 0: never. `consensus()` always does
    overlap : True sends weights while the next gradient is computed
    codec : for differences of weights; or a function from a shape to a codec. Needs two copies of
        the model on the host for each partner
    pull : factor on the mixing weight when there is a codec, in (0, 1]
    limit : if the spread exceeds it, all ranks take the exact mean; None: never automatically
    every : steps between measurements of the spread, each a sum of 258 numbers; 0: none
    bucket_bytes : largest message, unless a single tensor is larger
    wait_s : seconds to wait for other ranks before CompressError; a group of fewer than all ranks
        uses its own timeout
    process_set, group : of Horovod or of torch.distributed; None: all ranks of the one that is
        initialised. A group of fewer than all ranks can serve one optimizer only: create one for
        each. A group may also be an object with the methods of sn_compress.torch.gossip.peers.Peers

    Returns
    -------
    The optimizer, which additionally has
    consensus(also=()) : give all ranks the exact mean of weights and of the optimizer's tensors;
        `also` are other tensors, such as model.buffers(), whose floats are averaged. Call it on all
        ranks at the same step
    spread : the last measurement, or None: root mean square distance to the mean over the norm of
        the weights, within some 4 %
    report() : steps; bytes_per_step sent by this rank to partners; averages, the number of exact
        means taken; average_bytes, what this rank has added to their sums; other_bytes, the total
        for broadcasting the first weights, agreeing, and measuring the spread

    Raises CompressError for illegal settings, and on every rank if settings differ; at the first
    step if weights differ.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, _Gossiping):
        raise CompressError(
            f"got a {type(optimizer).__qualname__}; expected a torch.optim.Optimizer that is not a "
            "GossipOptimizer already"
        )
    settings = GossipSettings(
        topology, momentum=momentum, overlap=overlap, codec=codec, pull=pull, limit=limit,
        every=every,
    )  # fmt: skip
    if bucket_bytes < 1:
        raise CompressError(f"bucket_bytes={bucket_bytes}; expected 1 or more")
    if not wait_s > 0:
        raise CompressError(f"wait_s={wait_s!r}; expected seconds above 0")
    peers = find_peers(process_set, group, wait_s=wait_s)
    cls = type(optimizer)
    optimizer._sn = Gossip(optimizer, peers, settings, bucket_bytes)
    same_name = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    optimizer.__class__ = type(cls.__name__, (_Gossiping, cls), same_name)
    # An earlier scheduler has set `step` on the instance, which would hide that of the class.
    if (own := vars(optimizer).get("step")) is not None:

        @wraps(own)  # keeps the attribute by which the scheduler recognizes it
        def step(closure: Any = None) -> Any:
            return optimizer._sn.step(own, closure)

        optimizer.step = step
    return optimizer
