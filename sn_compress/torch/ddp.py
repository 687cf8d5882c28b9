"""Communication hook for torch's DistributedDataParallel.

    state = CompressionState(FFTCompression, named_parameters=model.named_parameters())
    ddp_model.register_comm_hook(state, compression_hook)

DDP hands the hook a bucket: the gradients of some parameters in one flat tensor. The engine knows
each parameter by name, because DDP makes new buckets after the first step. Of each bucket

1. what travels plain is all-reduced together, at once where it is all of the bucket;
2. what is compressed travels in the collectives that the engine asks for: one all-gather of
   payloads with FFTCompression, all-reduces of words, of several buckets at once, with
   LowRankCompression;
3. the mean is written into the bucket, after the last bucket.

Every rank reads the same bytes in the same order, so all end with the same bits. All of it runs
where the tensors are; the payloads of FFTCompression need the extra [cuda] there.
"""
# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import engine_state
from .._waiting import WAIT_S
from ..carry import Carry, Gradient
from ..codecs import saving
from ..compression import Compression, settings_of
from ..engine import Engine
from ..errors import CompressError
from ..feedback import ErrorFeedback
from ..prediction.tuning import Tuner
from ..saved import held, reading
from ..sums.session import SharedExchange
from .buckets import GROUP
from .digests import digest
from .layout import Axes, axes_of, reorder

_OVER = object()
# torch 2.13 gave it another name, and warns under the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Part:
    """One parameter's stretch of a flat tensor."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.elements]


class CompressionState:
    """What the hook of one DDP model keeps: settings, error memory, counts.

    Parameters
    ----------
    compression : FFTCompression or LowRankCompression, bare or by `using`. How long to wait for
        other ranks is the process group's matter: wait_s is refused
    process_group : the group that DDP has; None is the default group
    named_parameters : of the model, before or after DDP wraps it. Needed by state_dict only.
    scaler : the GradScaler, if there is one. The memory then follows its scale, and a step that it
        skips is taken back; costs a second copy of the memory.
    find_unused_parameters : as DDP has it. On CUDA tensors it costs one wait for the device a
        bucket, to keep the memory of parameters that were not used; on the CPU it is always on.

    Raises CompressError for what is none of ours in place of compression or group, and for settings
    that are not the same on all ranks (then in the first backward pass, on every rank).
    """

    def __init__(
        self,
        compression: type[Compression],
        process_group: Any = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        scaler: Any = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self.compression = compression
        self.settings = settings_of(compression, "CompressionState")
        _check_group(process_group)
        self.settings.refuse_torch_only("torch's DistributedDataParallel", tunes=True)
        if self.settings.wait_s != WAIT_S:
            raise CompressError(
                f"wait_s={self.settings.wait_s!r} has no effect with torch's "
                "DistributedDataParallel; it waits as long as its process group does. Set "
                "init_process_group(timeout=...)."
            )
        self.engine = Engine(
            self.settings, torch.get_num_threads(), stock="DDP", scaler=scaler,
            find_unused=find_unused_parameters,
        )  # fmt: skip
        self.feedback, self.shared = self.engine.feedback, self.engine.shared
        self.traffic = self.engine.traffic
        self.process_group = process_group
        # By identity; held, so that no other tensor can get the same one.
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._all_named = named_parameters is not None
        for name, parameter in named_parameters or ():
            self._names[id(parameter)] = parameter, name
        self._said: list[tuple[str, str]] | None = None  # of the parameters, in a step that asks
        self.waiting: list[Any] = []  # buckets whose rounds begin with that of a later one
        self.pending: list[Generator[None, None, None]] = []  # rounds that have begun

    @property
    def ranks(self) -> int:
        """How many take part."""
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return dist.get_rank(self.process_group)

    @property
    def exchange(self) -> ErrorFeedback | SharedExchange:
        """Where the memories are of what is compressed."""
        return self.engine.exchange

    @property
    def tuner(self) -> Tuner | None:
        """Of AutoCompression, from the first gradient on."""
        return self.engine.tuner

    @tuner.setter
    def tuner(self, tuner: Tuner) -> None:
        self.engine.tuner = tuner

    def report(self) -> dict[str, float]:
        """What this rank sent so far, and what the tuner chose; see Compression.report."""
        return self.engine.report()

    def parts(self, bucket: dist.GradBucket) -> list[Part]:
        """The parameters of a bucket in the order in which their gradients lie there."""
        found, start = [], 0
        for parameter in bucket.parameters():
            found.append(Part(self._name_of(parameter), start, tuple(parameter.shape)))
            start += parameter.numel()
        return found

    def _name_of(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._names:
            if self._all_named:
                raise CompressError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in named_parameters; "
                    "expected all of the model's. Pass model.named_parameters() of the model "
                    "that DDP has."
                )
            self._names[id(parameter)] = parameter, f"parameter {len(self._names)}"
        return self._names[id(parameter)][1]

    def rounds(
        self, flats: Sequence[tuple[torch.Tensor, Sequence[Part]]]
    ) -> Generator[None, None, None]:
        """Average flat tensors in place.

        Comes back whenever collectives have been started; going on waits for them. All ranks have
        to go through the rounds of all their tensors in the same order.
        """
        total = partial(self._total, flats[0][0].device)
        self._agree(flats[0][0])
        plain: list[Generator[None, None, None]] = []
        coded: list[Gradient] = []
        for flat, parts in flats:
            given = [Gradient(part.name, part.shape, part.of(flat)) for part in parts]
            step = self.engine.sort(given, ranks=self.ranks, total=total)
            for each in step.dense:
                each.values.copy_(self.engine.whole(each))
            if step.plain or step.dense:
                packed = None if step.coded else flat
                plain.append(self._plain_rounds(step.plain, step.dense, packed))
            coded += step.coded
        for begun in plain:
            next(begun)
        if coded:
            yield from self._coded_rounds(coded)
        else:
            yield
        for begun in plain:
            for _ in begun:
                pass

    def _plain_rounds(
        self, plain: list[Gradient], dense: list[Gradient], packed: torch.Tensor | None
    ) -> Generator[None, None, None]:
        """All-reduce gradients as they are; `packed` is the tensor that they are all of."""
        views = [each.values for each in (*plain, *dense)]
        together = torch.cat(views) if packed is None else packed
        together.div_(self.ranks)  # before the sum, which half precision might not hold
        work = self._sum(together)
        yield
        work.wait()
        if packed is None:
            for view, mean in zip(views, together.split([it.numel() for it in views]), strict=True):
                view.copy_(mean)
        for each in dense:
            self.engine.learn(str(each.name), each.values)

    def _coded_rounds(self, coded: Sequence[Gradient]) -> Generator[None, None, None]:
        """Do the collectives that the engine asks for."""
        rounds = self.engine.rounds(coded, ranks=self.ranks, rank=self.rank)
        with torch.no_grad():
            asked = next(rounds, None)
        while asked is not None:
            begun = [self._begin(carry) for carry in asked]
            yield
            for work, result in begun:
                work.wait()
                if result.is_cuda:  # made on the stream of the backward pass, read on this one
                    result.record_stream(torch.cuda.current_stream(result.device))
            try:
                with torch.no_grad():
                    asked = rounds.send([result for _, result in begun])
            except StopIteration:
                asked = None

    def _begin(self, carry: Carry) -> tuple[dist.Work, torch.Tensor]:
        words: torch.Tensor = carry.words
        if carry.kind == "sum":
            return self._sum(words), words
        gathered = words.new_empty(self.ranks * words.numel())
        return _all_gather(gathered, words, group=self.process_group, async_op=True), gathered

    def _sum(self, tensor: torch.Tensor) -> dist.Work:
        return dist.all_reduce(tensor, group=self.process_group, async_op=True)

    def _agree(self, like: torch.Tensor) -> None:
        named = self._names.values() if self._all_named else ()
        self.engine.agree(
            [
                (f"tensor {place}", f"{name!r} {tuple(parameter.shape)} {parameter.dtype}")
                for place, (parameter, name) in enumerate(named)
            ],
            total=partial(self._total, like.device), rank=self.rank, ranks=self.ranks, like=like,
            name="start", do="Make CompressionState alike on all ranks.",
        )  # fmt: skip

    def _total(self, device: torch.device, _: str, words: Any) -> Any:
        """The sum over the ranks, at once."""
        total = torch.from_numpy(words.copy()).to(device)
        self.traffic.beside(words.nbytes)
        self._sum(total).wait()
        return total.cpu().numpy()

    def begin_pass(self) -> None:
        """A backward pass begins; what is still there is of one that ended with an error."""
        self.waiting.clear()
        self.pending.clear()
        self.engine.new_step()
        self._said = [] if self.engine.sameness.step() else None

    def note(self, bucket: dist.GradBucket) -> None:
        """Take digests of a bucket's parameters in a pass that compares them."""
        if self._said is not None:
            self._said += [(self._name_of(p), digest(p)) for p in bucket.parameters()]

    def compare(self, device: torch.device) -> None:
        """At the end of such a pass: CompressError, on every rank, if parameters differ."""
        said, self._said = self._said, None
        if said is not None:
            total = partial(self._total, device)
            self.engine.compare(said, total=total, rank=self.rank, ranks=self.ranks)

    def state_dict(self) -> dict[str, Any]:
        """The error memory by parameter name, as torch tensors; it differs between ranks.

        Raises CompressError if parameters have no names.
        """
        if not self._all_named and self._names:
            raise CompressError(
                "parameters are known by the order of DDP's buckets only, which the next run may "
                "change; expected names. Make CompressionState(..., "
                "named_parameters=model.named_parameters())."
            )
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        state = engine_state.state_dict(self.engine, ranks=self.ranks, rank=self.rank)
        return saving.each(np.ndarray, torch.from_numpy, state | {"layout": self._layout()})

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take over this rank's state, or the list of all ranks' states, in order of rank.

        From as many ranks as there are now, each takes its own. From another number, each takes
        the mean: what all still have to send together is then what it was. Nothing changes if a
        state does not fit.
        """
        with reading("the saved state"):
            held(state)
            arrays = saving.each(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state)
        engine_state.load_state_dict(
            self.engine, arrays, ranks=self.ranks, rank=self.rank,
            changes=lambda saved: self._moved(saved.get("layout", {})),
        )  # fmt: skip

    def _layout(self) -> dict[str, Axes]:
        """How each parameter lies in memory, and so what is remembered of its gradient."""
        named = self._names.values()
        return {name: axes_of(parameter.shape, parameter.stride()) for parameter, name in named}

    def _moved(self, saved: Any) -> dict[str, Callable[[Any], Any]]:
        """For parameters that lie otherwise than they did: from the saved order to theirs."""
        found: dict[str, Callable[[Any], Any]] = {}
        for parameter, name in self._names.values():
            shape, new = tuple(parameter.shape), axes_of(parameter.shape, parameter.stride())
            old = saved.get(name, new) if isinstance(saved, dict) else None
            if not isinstance(old, list) or sorted(map(str, old)) != sorted(map(str, new)):
                raise CompressError(
                    f"the saved layout of {name!r} is {old!r}; expected the order of {len(new)} "
                    "axes. Load what state_dict() returned, unchanged."
                )
            if old != new:
                found[name] = partial(reorder, shape=shape, old=old, new=new)
        return found


def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # fmt: skip
    """Average a bucket's gradients over the ranks, compressed; for register_comm_hook.

    The collectives run beside the backward pass, what follows them after its last bucket. In a
    continuation of the collective's future it would run in a thread of Gloo's: in another order on
    each rank, and the program may end, and abort, before that thread has let go of Python.
    """
    check_state(state, "compression_hook")
    flat = bucket.buffer()
    if bucket.index() == 0:
        state.begin_pass()
    state.note(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[flat.device] if flat.is_cuda else None
    )
    # An embedding's sparse gradient is alone in its bucket, and travels as without the hook.
    if flat.is_sparse:
        state.pending.append(_sparse_rounds(state, flat, state.parts(bucket)[0].name, future))
        next(state.pending[-1])
    else:
        state.waiting.append((future, flat, state.parts(bucket)))
    large = sum(each.numel() for _, each, _ in state.waiting) >= GROUP
    if state.waiting and (large or bucket.is_last() or state.settings.exchange == "gather"):
        group, state.waiting = state.waiting, []
        state.pending.append(_group_rounds(state, group))
        next(state.pending[-1])
    while bucket.is_last() and state.pending:
        state.pending = [rounds for rounds in state.pending if next(rounds, _OVER) is not _OVER]
    if bucket.is_last():
        state.compare(flat.device)
    return future


def _group_rounds(
    state: CompressionState,
    group: Sequence[tuple[torch.futures.Future[torch.Tensor], Any, list[Part]]],
) -> Generator[None, None, None]:
    yield from state.rounds([(flat, parts) for _, flat, parts in group])
    for future, flat, _ in group:
        future.set_result(flat)


def _sparse_rounds(
    state: CompressionState,
    flat: torch.Tensor,
    name: str,
    future: torch.futures.Future[torch.Tensor],
) -> Generator[None, None, None]:
    flat = flat.div_(state.ranks).coalesce()  # as torch would, before it sends all of it
    nbytes = sum(each.numel() * each.element_size() for each in (flat.indices(), flat.values()))
    state.traffic.sparse(name, flat.values().numel(), nbytes)
    work = dist.all_reduce(flat, group=state.process_group, async_op=True)
    yield
    work.wait()
    future.set_result(work.get_future().wait()[0])


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise CompressError(
            f"CompressionState got a {type(group).__qualname__} as process_group; expected a "
            "group of torch.distributed, or None for all ranks. Name what comes behind it: "
            "named_parameters=..., scaler=..."
        )


def check_state(state: Any, where: str) -> None:
    """Raise CompressError if a hook was given something else in the place of its state."""
    if not isinstance(state, CompressionState):
        raise CompressError(
            f"{where} got a {type(state).__qualname__} as its state; expected a CompressionState. "
            "Make CompressionState(FFTCompression, named_parameters=model.named_parameters()), or "
            "of another compression."
        )
