"""Optimizers of Horovod's torch: what ranks agree on at the first gradient, and compare later."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from ... import __version__
from ...base._waiting import result_of
from ...base.agreement import Said, agree, alike, plain, question
from ...base.errors import CompressError
from ...devices.arrays import quickest
from ...engine.hardware import said
from ...settings import Settings
from ..digests import digest
from .in_flight import complete
from .memory import Memory

_DO = (
    "Give all ranks the same model, the same named_parameters in the same order, as many "
    "optimizers, and the same arguments."
)
_OPTIONS = ("op", "backward_passes_per_step", "gradient_predivide_factor", "sparse_as_dense")


def total(memory: Memory, process_set: Any, name: str, words: Any) -> Any:
    """The sum over the ranks, at once; counted as what is sent beside the gradients."""
    send = partial(hvd.allreduce_async, op=hvd.Sum, process_set=process_set)
    return _at_once(memory, name, torch.from_numpy(words.copy()), send).numpy()


def _at_once(memory: Memory, name: str, wire: torch.Tensor, send: Callable[..., int]) -> Any:
    """What comes of a collective that is waited for; counted beside the gradients."""
    memory.engine.traffic.beside(wire.nbytes)
    handle = send(wire, name=name)
    return result_of(hvd, handle, limit_s=memory.settings.wait_s, what=name)


def agree_on_optimizers(memory: Memory, optimizer: Any, new: Callable[[Any], bool]) -> list[Any]:
    """Raise CompressError, on all ranks, unless they have the same optimizers; those are returned.

    Asked when the first of them, `optimizer`, sends its first gradient. Horovod tells nobody of an
    optimizer that is made, so those alive are looked for, once the garbage is gone: Python clears
    it away at another moment on each rank.

    new : whether an optimizer is to be looked at; others have agreed before
    """
    gc.collect()
    alive = _optimizers(optimizer.process_set)
    if all(each is not optimizer for each in alive):  # frozen: the collector lists it no more
        alive.append(optimizer)
    found = list(filter(new, alive))
    _agree(memory, optimizer.process_set, _said(found))
    return found


def agree_on_number(memory: Memory, process_set: Any) -> int:
    """Return a number that names of collectives have not had on any rank.

    What an optimizer that is gone left behind on one rank waits in Horovod for one that never sends
    it. Under the names of a new optimizer it would be taken for that one's.
    """
    send = partial(hvd.allreduce_async, op=hvd.Max, process_set=process_set)
    return int(_at_once(memory, "sn.agree.number", torch.tensor([Memory.unused_number]), send))


def agree_on_fresh(memory: Memory, process_set: Any, *, fresh: bool) -> None:
    """Raise CompressError, on all ranks, unless all, or none, have gradients to send.

    Asked where an optimizer synchronizes again before it has made a step.
    """
    said = [("a backward pass since", str(fresh))]
    assert memory.buckets is not None  # laid out when the first gradient came
    name = memory.wire_name(f"sn.fresh.{memory.buckets.members[0][0]}")
    if not alike(total(memory, process_set, name, question(said))):
        raise CompressError(
            "an optimizer was synchronized again before its step, and some ranks have computed "
            "gradients since and others have not; expected a backward pass on all ranks or on "
            "none. Call backward() on every rank, or step() on none."
        )


def end_what_is_left(memory: Memory, process_set: Any) -> None:
    """Bring to an end what a step that broke off left with some ranks, which others never sent.

    For ever in Horovod's table it would do no harm, as later names are others, until a rank calls
    hvd.join(): what waits for that one alone is then carried out, and a rank that does not know it
    crashes. So all tell each other what they sent, and each sends a word for what it did not. It is
    of another form, so Horovod makes it an error for all, and waits no more.
    """
    words = "\n".join(f"{kind} {name}" for kind, name in sorted(memory.sent)) + "\n"
    wire = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)
    send = partial(hvd.allgather_async, process_set=process_set)
    told = _at_once(memory, memory.wire_name("sn.left"), wire, send)
    every = {tuple(it.split(" ", 1)) for it in bytes(told.tolist()).decode().split("\n") if it}
    for kind, name in sorted(every - memory.sent):
        with suppress(hvd.mpi_ops.HorovodInternalError):
            handle = _word(kind, name, process_set)
            result_of(hvd, handle, limit_s=memory.settings.wait_s, what=name)
    memory.forget_sent()


def _word(kind: str, name: str, process_set: Any) -> Any:
    if kind == "alltoall":
        words = torch.zeros(process_set.size(), dtype=torch.int32)
        return hvd.alltoall_async(words, name=name, process_set=process_set)
    word = torch.zeros(1, dtype=torch.int32)
    if kind == "gather":
        return hvd.allgather_async(word, name=name, process_set=process_set)
    return hvd.allreduce_async_(word, name=name, op=hvd.Sum, process_set=process_set)


def agree_on_calls(memory: Memory, process_set: Any) -> None:
    """The same for plain hvd.allreduce, at the first call of these settings."""
    _agree(memory, process_set, [("calls of", "hvd.allreduce"), *_said_of(memory.settings)])


def alike_in_hardware(memory: Memory, process_set: Any, device: torch.device) -> bool:
    """Whether all ranks compute products with the same bits; asked where sums carry factors."""
    mine = question(said(quickest(torch.zeros(1, device=device))))
    return alike(total(memory, process_set, "sn.hardware", mine))


def _agree(memory: Memory, process_set: Any, said: Said) -> None:
    agree(
        said, total=partial(total, memory, process_set), rank=process_set.rank(),
        ranks=process_set.size(), name="sn.agree", do=_DO,
    )  # fmt: skip


def _optimizers(process_set: Any) -> list[Any]:
    # By its type: to ask some objects for their class makes them import things.
    kinds = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [
        each
        for each in kinds
        if isinstance(getattr(getattr(each, "_compression", None), "settings", None), Settings)
        # That of Adasum has none, and is refused at its own first gradient.
        and hasattr(each, "process_set")
        and each.process_set.process_set_id == process_set.process_set_id
    ]


def _said(optimizers: list[Any]) -> Said:
    every = sorted(map(_said_of_one, optimizers))  # made in the same order, found in any
    named = [
        (f"optimizer {number}'s {what}" if len(every) > 1 else what, value)
        for number, said in enumerate(every)
        for what, value in said
    ]
    return [("number of optimizers", str(len(every))), *named]


def _said_of_one(optimizer: Any) -> list[tuple[str, str]]:
    names, groups = optimizer._parameter_names, optimizer._groups
    if isinstance(groups, list):
        groups = [[names.get(parameter) for parameter in group] for group in groups]
    reduced = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer._requires_update
    ]
    tensors = (
        (f"tensor {place}", f"{names[p]!r} {tuple(p.shape)} {p.dtype}")
        for place, p in enumerate(reduced)
    )
    options = ((option, plain(getattr(optimizer, option))) for option in _OPTIONS)
    return [*_said_of(optimizer._compression.settings), *options, ("groups", str(groups)), *tensors]


def _said_of(settings: Settings) -> list[tuple[str, str]]:
    return [*settings.said(), ("version of sn_compress", __version__)]


@dataclass
class Checked:
    """The first gradient of a step in which parameters are compared, and their digests' sum.

    The sum travels beside the gradients; who comes here has begun all of them.
    """

    memory: Memory
    optimizer: Any
    said: Said
    step: int
    handle: int
    inner: Any  # what is to be done with the gradient, or None

    @classmethod
    def begin(cls, memory: Memory, optimizer: Any, inner: Any) -> Checked:
        """Send the digest of the parameters that the step begins with."""
        said = [
            (name, digest(parameter))
            for parameter, name in optimizer._parameter_names.items()
            if parameter in optimizer._requires_update
        ]
        name = memory.wire_name("sn.same." + said[0][0])
        said = [*memory.engine.counted(), *said]
        words = question(said)
        memory.engine.traffic.beside(words.nbytes)
        memory.sent.add(("shared", name))
        handle = hvd.allreduce_async(
            torch.from_numpy(words), name=name, op=hvd.Sum, process_set=optimizer.process_set
        )
        return cls(memory, optimizer, said, memory.engine.sameness.steps - 1, handle, inner)

    def finish(self, reduced: Any) -> Any:
        """Called by Horovod; raises CompressError on every rank if parameters differ."""
        memory, sets = self.memory, self.optimizer.process_set
        what = f"the digest of the parameters at step {self.step}"
        asked = result_of(hvd, self.handle, limit_s=memory.settings.wait_s, what=what)
        if not alike(asked.numpy()):
            complete(memory, sets)  # another rank may wait for our words before it comes here
            raise memory.engine.sameness.apart(
                self.step, self.said, total=partial(total, memory, sets), rank=sets.rank(),
                ranks=sets.size(),
            )  # fmt: skip
        memory.engine.sameness.found(self.step)
        return reduced if self.inner is None else self.inner.finish(reduced)
