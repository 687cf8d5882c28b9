"""Communication hook for torch's DistributedDataParallel.

    state = CompressionState(FFTCompression, named_parameters=model.named_parameters())
    ddp_model.register_comm_hook(state, compression_hook)

DDP hands the hook a bucket: the gradients of some parameters in one flat tensor. Every parameter
is encoded by itself, with an error memory of its own, because DDP makes new buckets after the
first step. For each bucket then, with FFTCompression:

1. its small gradients, and those of types the codec does not take, are all-reduced together;
2. the payloads of all others, of fixed size, go into one vector, which is all-gathered;
3. after the last bucket, the mean is decoded once per parameter, into its bucket.

Every rank decodes the same bytes in the same order, so all end with the same bits. On CUDA tensors
encoding and decoding run where the tensors are, on torch's current stream (extra [cuda]). With
LowRankCompression the bucket's words are summed in rounds of all-reduces instead, on the host.

One file of this length, because hook, both exchanges and the scaler's undoing share the state of a
step.
"""
# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.

import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import __version__, _cuda, hardware
from .._waiting import WAIT_S
from ..agreement import agree, alike, question
from ..codecs import _device, saving
from ..codecs.base import Bytes, Payload
from ..codecs.gather import payloads_of
from ..compression import Compression, settings_of
from ..errors import CompressError
from ..feedback import ErrorFeedback
from ..owed import Owed
from ..prediction.tuning import Tuner
from ..report import Traffic
from ..sameness import Sameness
from ..saved import held, reading
from ..sums.session import SharedExchange
from ..theta import ThetaInTime, squares
from .digests import digest
from .layout import Axes, axes_of, reorder

_log = logging.getLogger(__name__)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FORMAT = 1
_GLANCE = 4096  # elements of a gradient looked at before all of them
_GROUP = 2**23  # elements of buckets whose words travel together: a collective costs its latency
_OVER = object()
_STEP = "step"  # what theta is counted by: all parameters have the same
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
        self.theta = ThetaInTime(self.settings, torch.get_num_threads())
        self.codec = self.settings.codec(torch.get_num_threads())  # of the step under way
        self._lost = 0.0, 0.0  # energy and error of this step on this rank, if theta follows them
        self.feedback = ErrorFeedback(self.codec, decay=self.settings.decay)
        self.process_group = process_group
        self._scaler = scaler
        self._find_unused = find_unused_parameters
        # By identity; held, so that no other tensor can get the same one.
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._all_named = named_parameters is not None
        for name, parameter in named_parameters or ():
            self._names[id(parameter)] = parameter, name
        self.feedback.undoable = scaler is not None
        self.shared = self.settings.shared()
        self._held: dict[str, Any] = {}  # memories of the shared exchange that sit this step out
        self._plainly: set[str] = set()  # of the tensor under way, by the tuner's choice
        self._owed = Owed()  # of tensors that the tuner lets travel plain
        self.tuner: Tuner | None = None  # of AutoCompression
        self.traffic = Traffic()
        self._agreed = False
        self._sameness = Sameness(self.settings.check_every)
        self._said: list[tuple[str, str]] | None = None  # of the parameters, in a step that asks
        self.waiting: list[Any] = []  # buckets whose rounds begin with that of a later one
        self.pending: list[Generator[None, None, None]] = []  # rounds that have begun
        self._seen: set[str] = set()  # in this step
        self._scale: float | None = None  # the unit of the memory

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
        """The one in use: where the memories are."""
        return self.shared if self.settings.exchange == "shared" else self.feedback

    def report(self) -> dict[str, float]:
        """What this rank sent so far, and what the tuner chose; see Compression.report."""
        return self.traffic.report() | (self.tuner.report() if self.tuner else {})

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
        self._agree(flats[0][0].device)
        self._plainly.clear()
        for flat, parts in flats:
            with _on_stream_of(flat):
                self._open_step(parts, flat.device)
            self._tune(flat, parts)
        if self.settings.exchange == "shared":
            yield from self._shared_rounds(flats)
            return
        under_way = [self._gather_rounds(flat, parts) for flat, parts in flats]
        while under_way:
            under_way = [rounds for rounds in under_way if next(rounds, _OVER) is not _OVER]
            if under_way:
                yield

    def _gather_rounds(
        self, flat: torch.Tensor, parts: Sequence[Part]
    ) -> Generator[None, None, None]:
        large, small = _split(flat, parts, self._takes)
        if not large:
            yield from self._plain_rounds(flat, small, flat)
            return
        packed = torch.cat([part.of(flat) for part in small]) if small else flat[:0]
        plain = self._plain_rounds(flat, small, packed)
        next(plain)
        wire = self._encode(flat, large)
        gathered = wire.new_empty(self.ranks * wire.numel())
        work = _all_gather(gathered, wire, group=self.process_group, async_op=True)
        yield
        work.wait()
        self._decode(flat, gathered, large)
        yield from plain

    def _plain_rounds(
        self,
        flat: torch.Tensor,
        parts: Sequence[Part],
        packed: torch.Tensor,
        shown: Sequence[Part] = (),
    ) -> Generator[None, None, None]:
        """All-reduce `packed`, where the values of these parts are, and write them into `flat`.

        shown : the parts of which this is but a dense step
        """
        for part in parts:
            count = self.traffic.dense if part in shown else self.traffic.plain
            count(part.name, part.elements, part.elements * packed.element_size())
        packed.div_(self.ranks)  # before the sum, which half precision might not hold
        work = self._sum(packed) if parts else None
        yield
        if work is not None:
            work.wait()
        if packed is not flat:
            for part, mean in zip(parts, _pieces(packed, parts), strict=True):
                part.of(flat).copy_(mean)

    def _tune(self, flat: torch.Tensor, parts: Sequence[Part]) -> None:
        """Have the tuner say which parts travel plain; what is owed of them goes along."""
        if not self.settings.tune or flat.dtype not in _FLOATS:
            return
        if self.tuner is None:
            self.tuner = Tuner(
                self.settings, ranks=self.ranks, total=partial(self._total, flat.device),
                methods=(self.settings.exchange,), plain="DDP",
            )  # fmt: skip
        for part in filter(self._fits, parts):
            if self.tuner.method(part.name, part.shape) == "plain":
                self._plainly.add(part.name)
                self._owed.take(part.name, self.exchange)
            if part.name in self._owed and (values := part.of(flat)).any():
                left = torch.from_numpy(self._owed.pay(part.name, part.elements))
                values += left.to(values)

    def _fits(self, part: Part) -> bool:
        fused = self.settings.exchange == "shared"
        return self.shared.takes(part.name, part.elements, fused=fused)

    def _takes(self, part: Part) -> bool:
        return part.name not in self._plainly and self._fits(part)

    def _sum(self, tensor: torch.Tensor) -> dist.Work:
        return dist.all_reduce(tensor, group=self.process_group, async_op=True)

    def _shared_rounds(
        self, flats: Sequence[tuple[torch.Tensor, Sequence[Part]]]
    ) -> Generator[None, None, None]:
        """Several flat tensors, whose words travel together."""
        plain, summed, shown = [], [], []
        for flat, parts in flats:
            large, small = _split(flat, parts, self._takes)
            dense = [part for part in large if self.shared.dense(part.name, part.shape)]
            for part in dense:
                values = part.of(flat)
                values.copy_(self.shared.whole(part.name, values, wire=flat.dtype))
            if not large or len(dense) == len(large):
                plain.append(self._plain_rounds(flat, parts, flat, dense))
            elif small or dense:
                packed = torch.cat([part.of(flat) for part in (*small, *dense)])
                plain.append(self._plain_rounds(flat, [*small, *dense], packed, dense))
            shown += [(part, flat) for part in dense]
            summed += [(part, flat) for part in large if part not in dense]
        for rounds in plain:
            next(rounds)
        if summed:
            yield from self._summed_rounds(summed)
        else:
            yield
        for rounds in plain:
            for _ in rounds:
                pass
        for part, flat in shown:
            self.shared.learn(part.name, part.of(flat))

    def _summed_rounds(
        self, summed: Sequence[tuple[Part, torch.Tensor]]
    ) -> Generator[None, None, None]:
        names = [part.name for part, _ in summed]
        views = [part.of(flat) for part, flat in summed]
        vectors = [view.float() for view in views]  # the same tensors if they are float32
        for name, vector in zip(names, vectors, strict=True):
            self._hold(name, vector)
        rounds = self.shared.exchange_all(
            names, vectors, ranks=self.ranks, rank=self.rank, outs=vectors
        )
        sent = 0
        try:
            with torch.no_grad():
                total = next(rounds)
                while True:
                    sent += total.nbytes
                    work = self._sum(total)
                    yield
                    work.wait()
                    total = rounds.send(total)
        except StopIteration:
            pass
        for view, vector in zip(views, vectors, strict=True):
            if view is not vector:
                view.copy_(vector)
        for part, _ in summed:
            if part.name in self._held:
                self._memory_put_back(part.name)
            # The words of all are counted with the first.
            self.traffic.shared(
                part.name, part.elements, sent, *self.shared.lost(part.name),
                way=self.shared.way(part.name),
            )  # fmt: skip
            sent = 0

    def _hold(self, name: str, vector: torch.Tensor) -> None:
        """Keep the memory of what this rank has not used from travelling.

        DDP drops the mean of a parameter that no rank has used, so nothing may be sent for it.
        Elsewhere the memory of a rank without a gradient only waits.
        """
        summable = self.shared.tensors[name].summable
        if summable is None or (vector.is_cuda and not self._find_unused):
            return
        # A look at a few is cheaper than one at all, and mostly enough.
        if not vector[:_GLANCE].any() and not vector.any():
            self._held[name] = summable.memory
            summable.replace(torch.zeros_like(vector))

    def _memory_put_back(self, name: str) -> None:
        summable = self.shared.tensors[name].summable
        if summable is not None:
            summable.replace(self._held[name])

    def _agree(self, device: torch.device) -> None:
        """Raise on every rank unless all have the same settings; asked once."""
        if self._agreed:
            return
        named = self._names.values() if self._all_named else ()
        said = [
            *self.settings.said(),
            ("scaler", "none" if self._scaler is None else "one"),
            ("version of sn_compress", __version__),
            *(
                (f"tensor {place}", f"{name!r} {tuple(parameter.shape)} {parameter.dtype}")
                for place, (parameter, name) in enumerate(named)
            ),
        ]
        agree(
            said, total=partial(self._total, device), rank=self.rank, ranks=self.ranks,
            name="start", do="Make CompressionState alike on all ranks.",
        )  # fmt: skip
        if self.settings.exchange == "shared":
            mine = question(hardware.said(torch.zeros(1, device=device)))
            self.shared.exact = not alike(self._total(device, "hardware", mine))
        self._agreed, self.traffic.speaks = True, self.rank == 0

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
        self._seen.clear()
        self._said = [] if self._sameness.step() else None

    def note(self, bucket: dist.GradBucket) -> None:
        """Take digests of a bucket's parameters in a pass that compares them."""
        if self._said is not None:
            self._said += [(self._name_of(p), digest(p)) for p in bucket.parameters()]

    def compare(self, device: torch.device) -> None:
        """At the end of such a pass: CompressError, on every rank, if parameters differ."""
        said, self._said = self._said, None
        if said is None:
            return
        total, at = partial(self._total, device), self._sameness.steps - 1
        if not alike(total("same", question(said))):
            raise self._sameness.apart(at, said, total=total, rank=self.rank, ranks=self.ranks)
        self._sameness.found(at)

    def _open_step(self, parts: Sequence[Part], device: torch.device) -> None:
        names = {part.name for part in parts}
        if names & self._seen or not self._seen:
            self._settle()
            self._seen.clear()
            if self.settings.exchange == "gather":
                self._next_theta(device)
        self._seen |= names

    def _next_theta(self, device: torch.device) -> None:
        """The codec of the step that begins, the same for all parameters and on all ranks."""
        energy, error = self._lost
        if self.theta.learns:
            energy, error = self._total(device, "lost", np.array(self._lost)).tolist()
        self.codec = self.theta.codec_at(self.theta.begin_step(_STEP, energy, error))
        self._lost = 0.0, 0.0

    def _tell(self, payload: Payload) -> None:
        if self.theta.learns:
            energy, error = self._lost
            more = self.theta.tell(payload, wide=True)
            self._lost = energy + more[0], error + more[1]

    def _settle(self) -> None:
        """Take a step back that the scaler skipped; bring the memory to the present scale."""
        if self._scaler is None:
            self._held.clear()
            return
        scale = float(self._scaler.get_scale())
        if self._scale is not None:
            if scale < self._scale:  # that is how a scaler says so, on all ranks alike
                self.feedback.undo()
                self.shared.undo()
                self._owed.undo()
                for name in self._held:
                    self._memory_put_back(name)
            if scale != self._scale:
                self.feedback.rescale(scale / self._scale)
                self.shared.rescale(scale / self._scale)
                self._owed.rescale(scale / self._scale)
        self.feedback.settle()
        self.shared.settle()
        self._owed.settle()
        self._held.clear()
        self._scale = scale

    def _encode(self, flat: torch.Tensor, large: Sequence[Part]) -> torch.Tensor:
        """The payloads one behind the other, [bytes] uint8 where `flat` is."""
        sizes = [self.codec.payload_bytes(part.elements) for part in large]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=flat.device)
        pieces = wire.split(sizes)
        if flat.is_cuda:
            payloads = self._encode_on_device([part.of(flat) for part in large], large, pieces)
        else:
            payloads = [
                self._encode_on_host(part, flat, piece.numpy())
                for part, piece in zip(large, pieces, strict=True)
            ]
        for part, payload in zip(large, payloads, strict=True):
            self._tell(payload)
            if self.traffic.payload(part.name, part.elements, payload, 0):
                _log.warning(
                    "%s: values beyond the fixed window were clipped; see `saturated` in the "
                    "report",
                    part.name,
                )
        return wire

    def _encode_on_host(self, part: Part, flat: torch.Tensor, buffer: Bytes) -> Payload:
        values = part.of(flat).float().numpy()
        # DDP drops the mean of a parameter that no rank has used, so nothing may be sent for it.
        # Elsewhere the memory of a rank without a gradient only waits. The start of a gradient
        # mostly tells.
        used = values[:_GLANCE].any() or values.any()
        if not self.settings.feedback or not used:
            return self.codec.encode_into(buffer, values)
        memory = self.feedback.memory_of(part.name, values)
        return self.codec.encode_into(buffer, values, state=memory, decay=self.settings.decay)

    def _encode_on_device(
        self, vectors: list[torch.Tensor], large: Sequence[Part], pieces: Sequence[torch.Tensor]
    ) -> list[Payload]:
        used = [True] * len(vectors)
        if self._find_unused:
            used = torch.stack([vector.any() for vector in vectors]).tolist()
        with _on_stream_of(vectors[0]):
            states = None
            if self.settings.feedback:
                states = [
                    self.feedback.memory_of(part.name, vector)
                    if is_used
                    else self.codec.new_state(part.elements, like=vector)
                    for part, vector, is_used in zip(large, vectors, used, strict=True)
                ]
            buffers = [_cuda.view(piece).array() for piece in pieces]
        encoder = _device.Encoder(self.codec, vectors, states, buffers)
        return encoder.run(self.settings.decay)

    def _decode(self, flat: torch.Tensor, gathered: torch.Tensor, large: Sequence[Part]) -> None:
        """Write the means into `flat`."""
        sizes = [self.codec.payload_bytes(part.elements) for part in large]
        if flat.is_cuda:
            # Made on the stream of the backward pass, read on this one.
            gathered.record_stream(torch.cuda.current_stream(flat.device))
            ends = list(accumulate(sizes, initial=0))
            with _on_stream_of(flat):
                whole = _cuda.view(gathered).array().reshape(self.ranks, -1)
                arrays = [whole[:, first:last] for first, last in pairwise(ends)]
            outs = [part.of(flat) for part in large]
            _device.Decoder(self.codec, arrays, outs).run()
            return
        rows = gathered.view(self.ranks, -1).numpy()
        at = 0
        for part, size in zip(large, sizes, strict=True):
            payloads = payloads_of([row[at : at + size] for row in rows], part.elements)
            at += size
            if flat.dtype == torch.float32:
                self.codec.decode_mean_into(payloads, part.of(flat).numpy())
            else:
                part.of(flat).copy_(torch.from_numpy(self.codec.decode_mean(payloads)))

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
        self._settle()
        self._seen.clear()
        state = {
            "format": _FORMAT, "ranks": self.ranks, "rank": dist.get_rank(self.process_group),
            "scale": self._scale, "feedback": self.feedback.state_dict(),
            "shared": self.shared.state_dict(), "layout": self._layout(),
            "theta": self.theta.state_dict(), "lost": list(self._lost),
            "owed": self._owed.state_dict(),
        }  # fmt: skip
        return saving.each(np.ndarray, torch.from_numpy, state)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take over this rank's state, or the list of all ranks' states, in order of rank.

        From as many ranks as there are now, each takes its own. From another number, each takes
        the mean: what all still have to send together is then what it was. Nothing changes if a
        state does not fit.
        """
        with reading("the saved state"):
            self._load(state)

    def _load(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        held(state)
        states = [state] if isinstance(state, dict) else list(state)
        for entry in states:
            if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
                raise CompressError(
                    "not a state of CompressionState.state_dict(); expected what it returned, "
                    "unchanged"
                )
        states = saving.each(torch.Tensor, lambda tensor: tensor.cpu().numpy(), states)
        saved = states[0]["ranks"] if states else 0
        rank = self.rank
        own = [entry for entry in states if entry["rank"] == rank]
        if saved == self.ranks and len(own) == 1:
            states = own
        elif not saved or [entry["rank"] for entry in states] != list(range(saved)):
            raise CompressError(
                f"got states {[entry['rank'] for entry in states]} of {saved} for rank {rank} "
                f"of {self.ranks}; expected this rank's own, or the list of all that were saved"
            )
        scale = states[0]["scale"]
        if scale is not None and not (isinstance(scale, float) and 0 < scale < math.inf):
            raise CompressError(f"a saved scale is {scale!r}; expected a number above 0, or None")
        moved = self._moved(states[0].get("layout", {}))
        owed = Owed.mean([entry.get("owed", {}) for entry in states])
        for name, change in moved.items():
            owed.change(name, change)
        lost = [squares(entry.get("lost", (0.0, 0.0))) for entry in states]
        with self.theta.loading(states[0]):
            self._load_exchanges(states, moved)
        # What the ranks' sum was; of other numbers of ranks, each brings its part.
        parts = self.ranks if len(lost) > 1 else 1
        energy, error = (math.fsum(each) / parts for each in zip(*lost, strict=True))
        self._lost, self._owed = (energy, error), owed
        self._scale = scale
        self._held.clear()
        self._seen.clear()

    def _load_exchanges(
        self, states: Sequence[dict[str, Any]], moved: dict[str, Callable[[Any], Any]]
    ) -> None:
        """Both exchanges, or none."""
        shared, feedback = self.shared.kept(), self.feedback.kept()
        try:
            self.shared.load_state_dict(_mean_of_shared([entry["shared"] for entry in states]))
            if len(states) == 1:
                self.feedback.load_state_dict(states[0]["feedback"])
            else:
                self.feedback.load_mean([entry["feedback"] for entry in states])
            for name, change in moved.items():
                self.feedback.change(name, change)
                self.shared.change(name, change)
        except Exception:
            self.shared.put_back(shared)
            self.feedback.put_back(feedback)
            raise

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
    large = sum(each.numel() for _, each, _ in state.waiting) >= _GROUP
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


@contextmanager
def _on_stream_of(flat: torch.Tensor) -> Iterator[None]:
    """CuPy working on torch's current stream; nothing for a tensor on the host."""
    if not flat.is_cuda:
        yield
        return
    with _cuda.view(flat).run().context():
        yield


@cache
def _say_host_once() -> None:
    _log.warning("LowRankCompression works on the host: gradients on CUDA devices are copied there")


def _split(
    flat: torch.Tensor, parts: Sequence[Part], takes: Callable[[Part], bool]
) -> tuple[list[Part], list[Part]]:
    """The parts to compress, and those to leave as they are."""
    large = [part for part in parts if flat.dtype in _FLOATS and takes(part)]
    return large, [part for part in parts if part not in large]


def _pieces(packed: torch.Tensor, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
    return packed.split([part.elements for part in parts]) if parts else ()


def _mean_of_shared(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of the shared exchange with the mean of the ranks' memories."""
    first = states[0]
    tensors = dict(first["tensors"])
    for name, entry in tensors.items():
        if "summable" in entry and len(states) > 1:
            memories = [state["tensors"][name]["summable"]["memory"] for state in states]
            mean = np.mean(memories, axis=0, dtype=np.float64).astype(np.float32)
            tensors[name] = {**entry, "summable": {**entry["summable"], "memory": mean}}
    return {**first, "tensors": tensors}
