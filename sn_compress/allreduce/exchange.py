"""The shared exchange of a whole model: dense steps first, then a size for every tensor.

Training begins with a few dense steps: compression hurts most there, and they give every rank the
same mean gradients, from which it proposes sizes (`allocate.py`). All ranks use the sizes of one
rank, which are exchanged in a separate round before the first compressed step: sizes computed from
floats might differ between ranks because of the last bit, and so would word counts. Occasionally
there is another dense step, which includes the memories, and sizes are chosen again. A tensor whose
means were all zeros, e.g. because a loss starts late, is sent whole until they are not; then its
dense steps begin. A tensor that got few words, and whose memory keeps growing, has its next dense
step early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import saved
from ..arrays import (
    INT32,
    Array,
    asarray_like,
    full_fp32_matmul,
    is_used,
    namespace,
    numpy_view,
    on_host,
    put_all,
    to_host,
)
from ..codecs.base import MAX_ELEMENTS, Floats
from ..collective import Collective, Gradient, Rounds, dtype_name
from ..errors import CompressError
from ..ops.fixed_point import times_power
from ..saved import reading
from .allocate import (
    Allocation,
    budget,
    check_settings,
    decode_sizes,
    encode_sizes,
    is_large,
    is_outgrown,
    is_small,
    looks,
    majority,
    next_vote,
    norm_of,
    votes,
)
from .bucket import Result
from .methods.base import StepOptions
from .state import JointStep, StepStatus, Tensor, propose

_FORMAT = 6


@dataclass(frozen=True)
class _Step:
    """A step in progress; norms : gradient norms of the tensors whose memory it measures."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    joint: JointStep
    norms: Sequence[tuple[Tensor, float]]


class AllReduceExchange:
    """All tensors of one optimizer on one rank, by name.

    Parameters
    ----------
    ratio : float32 bytes of the gradients over bytes a rank adds to the sums, small tensors
        included; if rank one for every matrix exceeds that, rank one is sent
    warmup : number of dense steps at the start, at least 1
    every : interval between dense steps after that
    min_elements : smaller tensors are not compressed, nor vectors below `allocate.VECTOR`
    feedback, decay : whether to keep error memories, and the factor on them
    frequencies : whether convolutions may be sent by frequencies of their kernels
    traffic : the report.Traffic that counts bytes
    find_unused, drops_unused, pauses : see Engine
    """

    def __init__(
        self,
        *,
        ratio: float,
        warmup: int = 10,
        every: int = 2000,
        min_elements: int = 1024,
        feedback: bool = True,
        decay: float = 1.0,
        frequencies: bool = False,
        traffic: Any = None,
        find_unused: bool = False,
        drops_unused: bool = False,
        pauses: bool = False,
    ) -> None:
        check_settings(ratio, warmup, every)
        self.ratio, self.warmup, self.every = ratio, warmup, every
        self.min_elements = min_elements
        self.exact = False  # set if ranks' hardware differs
        self.decay = decay if feedback else 0.0
        self.frequencies = frequencies
        self.tensors: dict[str, Tensor] = {}
        self._left_out: dict[str, int] = {}  # elements of uncompressed tensors
        self._ranks = 1  # number of ranks in the last step
        # Status of each tensor's last step, and the step's first tensor.
        self._verdicts: dict[str, tuple[StepStatus, str]] = {}
        self._traffic = traffic
        self._find_unused, self._drops_unused, self._pauses = find_unused, drops_unused, pauses
        self._excluded: dict[str, Array] = {}  # memories that are not sent in this step

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor is compressed; if not, its elements are counted as left out.

        Rims call it for the gather exchange as well.
        """
        taken = is_large(shape, self.min_elements)
        if not taken:
            self._left_out[name] = math.prod(shape)
        return taken

    def dense(self, name: str, shape: Sequence[int]) -> bool:
        """Whether this tensor's next gradient travels uncompressed."""
        tensor = self._tensor(name, shape)
        tensor.restart_on_energy()
        step = tensor.step
        return step < self.warmup or (step - self.warmup) % self.every == self.every - 1

    def dense_values(self, name: str, values: Array, *, wire: Any = None) -> Array:
        """Return what to send in a dense step, [n] of `wire`: the values plus the residual.

        wire : a dtype of the library of `values`; its rounding error is remembered. None: float32
        """
        tensor = self._next(name)
        xp = namespace(values)
        vector = xp.astype(values, xp.float32)
        residual, tensor.owed = tensor.residual(), None
        if residual is not None and self._may_be_dropped(values):
            tensor.owed = residual
            return vector if wire is None else xp.astype(vector, wire)
        if residual is not None:
            vector = vector + asarray_like(residual, vector) * self.decay
        if wire in (None, xp.float32):
            return vector
        with full_fp32_matmul(vector):  # suppresses overflow warnings
            sent = xp.astype(vector, wire)
            lost = vector - xp.astype(sent, xp.float32)
            # A value beyond half precision makes the mean Inf: that step is lost, and must not
            # leave a residual.
            lost = xp.where(xp.isfinite(lost), lost, xp.zeros_like(lost))
        if self.decay:
            tensor.owed = lost
        return sent

    def learn(self, name: str, mean: Array) -> None:
        """Record the mean gradient of a dense step, [n]; the same on every rank."""
        tensor = self.tensors[name]
        xp = namespace(mean)
        # A copy, as the optimizer owns the array. Whether the mean is finite is not checked here,
        # which would wait for a device: if it is not, `propose` goes back to `earlier`.
        tensor.mean = xp.reshape(xp.astype(mean, xp.float32, copy=True), (-1,))
        tensor.earlier, tensor.summable = tensor.summable or tensor.earlier, None
        tensor.proposed = None

    def rounds(self, gradients: Sequence[Gradient], *, ranks: int, rank: int | None) -> Rounds:
        """Average gradients in place, in a step that is not dense for any of them.

        After a dense step sizes are exchanged first, in a separate round; in a step with a vote,
        votes come last. If `rank` is None, which must be so on all ranks, no tensor is sent by
        rows, and each rank uses its own sizes.
        """
        names = [str(gradient.name) for gradient in gradients]
        new = self._proposed(names, ranks, rank)
        like, first = gradients[0].values, self.tensors[names[0]]
        nbytes, xp = 0, namespace(like)
        # Views of the gradients if they are float32; others are written back at the end.
        means = [numpy_view(xp.astype(g.values, xp.float32, copy=False)) for g in gradients]
        late = not on_host(means[0])
        try:
            vectors = means
            if new and rank is not None:
                if not late:
                    # Copy: the caller may write to its gradients in the meantime.
                    vectors = [namespace(vector).asarray(vector, copy=True) for vector in means]
                own = encode_sizes(new, ranks=ranks, rank=rank)
                first.size_words = own.size
                nbytes += own.nbytes
                (summed,) = yield [Collective("sum", asarray_like(own, like))]
                shapes = {name: size.shape for name, size in new.items()}
                new = decode_sizes(to_host(numpy_view(summed, INT32)), shapes, ranks=ranks)
            step = self._begin(names, vectors, new, means, ranks=ranks, rank=rank)
            words, result = next(step.joint.rounds), None
            if late and self._traffic is not None:
                # For the last step, which has ended by now; reading it then would have waited.
                for name in names:
                    self._traffic.lost(*self.lost(name))
            while result is None:
                nbytes += words.nbytes
                (summed,) = yield [Collective("sum", asarray_like(words, like))]
                try:
                    words = step.joint.rounds.send(numpy_view(summed, INT32))
                except StopIteration as ended:
                    result = ended.value
            # In a step with a vote, each rank votes on every small tensor.
            if voted := self._end(step, result):
                ballot = votes([self._outgrown(one) for one in voted])
                first.size_words += ballot.size
                nbytes += ballot.nbytes
                (summed,) = yield [Collective("sum", asarray_like(ballot, like))]
                outgrown = majority(to_host(numpy_view(summed, INT32)), len(voted))
                for tensor in compress(voted, outgrown):
                    tensor.step = self.warmup - 1  # its next step is dense
            if self._pauses:
                yield []
        finally:
            for name in names:
                if name in self._excluded and (summable := self.tensors[name].summable) is not None:
                    summable.include(self._excluded.pop(name))
        for gradient, mean in zip(gradients, means, strict=True):
            if dtype_name(gradient.values) != "float32":
                back = asarray_like(mean, gradient.values)
                gradient.values[...] = xp.astype(back, gradient.values.dtype)
        self._tell(gradients, nbytes, late=late)

    def _proposed(
        self, names: Sequence[str], ranks: int, rank: int | None
    ) -> dict[str, Allocation]:
        """Begin a step; return this rank's proposed sizes for tensors that have none."""
        self._ranks = ranks
        tensors = [self._next(name) for name in names]
        # Propose for all that have none, not only these: they share a budget of words.
        if any(tensor.summable is None and tensor.proposed is None for tensor in tensors):
            propose(
                self.tensors,
                sum(self._left_out.values()),
                ratio=self.ratio,
                ranks=ranks,
                rows=rank is not None,
                frequencies=self.frequencies,
            )
        return {
            name: tensor.proposed
            for name, tensor in zip(names, tensors, strict=True)
            if tensor.summable is None and tensor.proposed is not None
        }

    def _begin(
        self,
        names: Sequence[str],
        values: Sequence[Array],
        sizes: Mapping[str, Allocation],
        means: Sequence[Array],
        *,
        ranks: int,
        rank: int | None,
    ) -> _Step:
        """Apply new sizes; create the joint step of all these tensors."""
        for name, size in sizes.items():
            self.tensors[name].begin(size)
        # Only now, as a tensor that has just got a size has a memory from here on.
        for name, value in zip(names, values, strict=True):
            summable = self.tensors[name].summable
            if summable is not None and self._may_be_dropped(value):
                self._excluded[name] = summable.exclude(namespace(value).zeros_like(value))
        tensors = [self.tensors[name] for name in names]
        xp = namespace(values[0])
        vectors = [
            times_power(xp.reshape(value, (-1,)), -tensor.exponent)
            for value, tensor in zip(values, tensors, strict=True)
        ]
        measured = [(t, v) for t, v in zip(tensors, vectors, strict=True) if looks(self._since(t))]
        joint = JointStep(
            [tensor.summable for tensor in tensors if tensor.summable is not None],
            vectors, StepOptions(ranks, rank, self.decay, self.exact), means,
        )  # fmt: skip
        # Norms now: the step overwrites gradients with their means.
        norms = [(tensor, norm_of(vector)) for tensor, vector in measured]
        return _Step(names, tensors, joint, norms)

    def _end(self, step: _Step, result: Result) -> list[Tensor]:
        """Store the result of the rounds; return the tensors whose sizes are voted on now."""
        means, status = step.joint.end(result)
        for mean, tensor in zip(means, step.tensors, strict=True):
            if tensor.exponent:
                put_all([mean], [times_power(mean, tensor.exponent)])
        for name in step.names:
            self._verdicts[name] = status, step.names[0]
        # On the host a corrupt sum raises in this step; on a device in the next one, as this one
        # does not wait for the device.
        if on_host(means[0]):
            status.read()
        for tensor, mean in zip(step.tensors, means, strict=True):
            tensor.note_energy(mean)
        for tensor, norm in step.norms:
            if tensor.summable is not None:
                tensor.note_held(norm_of(tensor.summable.memory), norm)
        return [tensor for tensor, _ in step.norms if self._votes(tensor)]

    def _may_be_dropped(self, values: Array) -> bool:
        """Whether this rank has not used the gradient's parameter, so its memory must wait.

        A framework drops the mean if no rank has used it, and what was sent would be lost.
        """
        # Detecting zeros waits for a device, so there it is opt-in.
        detects = self._drops_unused and (on_host(values) or self._find_unused)
        return detects and not is_used(values)

    def _tell(self, gradients: Sequence[Gradient], nbytes: int, *, late: bool) -> None:
        """Count a step; the words of all tensors are counted with the first."""
        if self._traffic is None:
            return
        for gradient in gradients:
            name = str(gradient.name)
            energy, error = (0.0, 0.0) if late else self.lost(name)
            method = self.method(name)
            self._traffic.shared(name, gradient.elements, nbytes, energy, error, method=method)
            nbytes = 0

    def until_vote(self, name: str) -> int | None:
        """Return the steps before the next vote on a tensor's size; None if there is none."""
        tensor = self.tensors[name]
        since = self._since(tensor)
        return next_vote(since) - since - 1 if self._is_small(tensor) else None

    def _votes(self, tensor: Tensor) -> bool:
        """Whether ranks vote on a tensor in this step; follows from shared counts and sizes."""
        since = self._since(tensor)
        return next_vote(since - 1) == since and self._is_small(tensor)

    def _since(self, tensor: Tensor) -> int:
        """Return the number of steps since a size was chosen."""
        return (tensor.step - self.warmup) % self.every

    def _is_small(self, tensor: Tensor) -> bool:
        even = math.prod(tensor.shape) / self.ratio
        return tensor.size is not None and is_small(tensor.size, even, self._ranks)

    def _outgrown(self, tensor: Tensor) -> bool:
        """Return this rank's vote: the memory holds more than others', and the size is small."""
        tensors = list(self.tensors.values())
        n, left_out = math.prod(tensor.shape), sum(self._left_out.values())
        # The budget `propose` would have for this tensor alone, less the share of plain ones.
        even = budget(n, left_out * n / sum(math.prod(t.shape) for t in tensors), self.ratio)
        if tensor.size is None or not is_small(tensor.size, even, self._ranks):
            return False
        held = [t.held for t in tensors if t.held is not None and not self._is_small(t)]
        return tensor.held is not None and is_outgrown(tensor.held, held)

    def words(self, name: str, ranks: int) -> list[int]:
        """Return the 4-byte words that a tensor sends in each round, once its size is chosen.

        Words for agreeing on sizes come first; they count for the first tensor of an exchange.
        """
        tensor = self.tensors[name]
        sizes = [tensor.size_words] if tensor.size_words else []
        return sizes + tensor.summable.words(ranks) if tensor.summable else []

    def stop(self, name: str) -> None:
        """Stop compressing a tensor, on all ranks; its residual is kept."""
        tensor = self.tensors.get(name)
        if tensor is not None and tensor.summable is not None:
            residual = tensor.residual()
            self._next(name)
            tensor.summable, tensor.proposed, tensor.owed = None, None, residual

    def release(self, name: str) -> Floats:
        """Return and clear the residual of a tensor, [n], which is now sent uncompressed."""
        residual = self.residual(name) * np.float32(self.decay)
        tensor = self.tensors[name]
        tensor.open()  # an abort restores it
        tensor.owed = None
        return residual

    def lost(self, name: str) -> tuple[float, float]:
        """Return the squared norms of gradient plus memory in the last step, and of the residual.

        For tensors that travelled together, the first one has the sum of all, the others zeros.
        """
        verdict, first = self._verdicts.get(name, (None, name))
        return (0.0, 0.0) if verdict is None or first != name else verdict.read()[1:]

    def method(self, name: str) -> str:
        """Return how a tensor whose size is chosen is sent: one of allocate.METHODS, or "whole"."""
        size = self.tensors[name].size
        return "whole" if size is None or size.size == 0 else size.method

    def _next(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        tensor.open()
        tensor.step, tensor.size_words = tensor.step + 1, 0
        return tensor

    def _tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            tensor = self.tensors[name] = Tensor(tuple(shape))
        if tensor.shape != tuple(shape):
            raise CompressError(
                f"{name!r} has shape {tuple(shape)}; before it was {tensor.shape}. Names must be "
                "unique and shapes constant."
            )
        return tensor

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Keep all changes of these tensors, or all: `abort` reverts only later ones."""
        for tensor in self._some(names):
            tensor.commit()

    def abort(self, names: Iterable[str] | None = None) -> None:
        """Restore the memories of these tensors, or all, to the last commit; see Tensor.abort."""
        for tensor in self._some(names):
            tensor.abort()

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Abort a failed step, including its count; see Tensor.undo."""
        for tensor in self._some(names):
            tensor.undo()

    def _some(self, names: Iterable[str] | None) -> list[Tensor]:
        known = self.tensors
        return [known[name] for name in (known if names is None else names) if name in known]

    def rescale(self, factor: float) -> None:
        """Multiply everything that scales with gradients, e.g. when a loss scale has changed."""
        for name, tensor in self.tensors.items():
            self.change(name, lambda values: values * np.float32(factor))
            if tensor.summable is not None:
                tensor.summable.rescale(factor)

    def state_dict(self, aborted: Collection[str] = ()) -> dict[str, Any]:
        """Return everything needed to resume bit by bit; only the memories differ between ranks.

        aborted : names of tensors that are saved as `abort` would leave them
        """
        return {
            "format": _FORMAT,
            "left_out": dict(self._left_out),
            "tensors": {
                name: (tensor.aborted() if name in aborted else tensor).state_dict()
                for name, tensor in self.tensors.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict returned; nothing changes if it does not fit."""
        with reading("the saved state of LowRankCompression"):
            saved.held(state)
            if not isinstance(state, dict) or state.get("format") != _FORMAT:
                raise CompressError(
                    f"not a state of format {_FORMAT} of LowRankCompression; expected what "
                    "state_dict() returned, unchanged"
                )
            loaded = {}
            for name, entry in state["tensors"].items():
                with reading(f"the saved state of {name!r}"):
                    loaded[_name(name)] = Tensor.load(entry)
            left_out = {
                _name(name): saved.count(n, "size of a tensor left out", high=MAX_ELEMENTS)
                for name, n in state["left_out"].items()
            }
        self.tensors, self._left_out = loaded, left_out

    def snapshot(self) -> tuple[Any, Any]:
        """Return what loading replaces, for `restore` if something else cannot be loaded."""
        return self.tensors, self._left_out

    def restore(self, snapshot: tuple[Any, Any]) -> None:
        """Undo loading."""
        self.tensors, self._left_out = snapshot

    def remembers(self, name: str) -> bool:
        """Whether there is a memory of `name`."""
        return name in self.tensors and self.tensors[name].residual() is not None

    def residual(self, name: str) -> Floats:
        """Return this rank's residual of `name`, [n] float32."""
        tensor = self.tensors.get(name)
        residual = None if tensor is None else tensor.residual()
        if residual is None:
            raise CompressError(f"there is no memory of {name!r}; known: {sorted(self.tensors)}")
        return np.array(to_host(residual))

    def change(self, name: str, function: Callable[[Floats], Floats]) -> None:
        """Replace a tensor's mean and residual by function(vector), [n] float32."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return
        for kind in ("mean", "owed"):
            if (values := getattr(tensor, kind)) is not None:
                setattr(tensor, kind, function(to_host(values)))
        if tensor.summable is not None:
            tensor.replace(function(to_host(tensor.residual())))

    def move(self, name: str, function: Callable[[Floats], Floats]) -> None:
        """Restart a tensor whose layout, and thus matrix, has changed, but keep its residual.

        It starts with dense steps, as its directions are unknown.
        function : maps [n] float32 in the old layout to the new shape
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return
        residual = tensor.residual()
        # Without a residual use zeros, just to get the new shape.
        old = np.zeros(math.prod(tensor.shape), np.float32) if residual is None else residual
        new = function(to_host(old))
        self.tensors[name] = Tensor(new.shape, owed=None if residual is None else new.reshape(-1))

    def restart(self, residuals: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Discard everything except these residuals; shapes may differ from now on."""
        self._left_out.clear()
        self.tensors = {
            name: Tensor(residual.shape, owed=residual.reshape(-1).copy())
            for name, residual in residuals.items()
        }

    def sizes(self, state: dict[str, Any]) -> dict[str, int]:
        """Return the number of elements of each tensor in a saved state, by name.

        Includes tensors without a residual, e.g. after a dense step: other ranks may have one.
        """
        return {name: math.prod(entry["shape"]) for name, entry in state["tensors"].items()}

    def unsent(self, name: str) -> Floats | None:
        """Return a tensor's residual on this rank, [n] float32; None if it is unknown here."""
        if self.remembers(name):
            return self.residual(name)
        known = self.tensors.get(name)
        return None if known is None else np.zeros(math.prod(known.shape), np.float32)

    def load_with_residuals(self, state: dict[str, Any], residuals: Mapping[str, Floats]) -> None:
        """Load another rank's state, with its residuals replaced by these, [n] each."""
        self.load_state_dict(state)
        for name, residual in residuals.items():
            if self.remembers(name) or residual.any():
                self.tensors[name].replace(residual.astype(np.float32))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise CompressError(f"a saved tensor is named {name!r}; expected a string")
    return name
