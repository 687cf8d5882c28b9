"""The shared exchange of a whole model: dense steps first, then a size for every tensor.

A few dense steps begin the training: they are where compression hurts most, and they show every
rank the same mean gradients, from which each proposes sizes (`allocate.py`). All take those of one
rank, which travel in a round of their own before the first step that is not dense: what each
computes from floats may differ in the last bit, and then word counts would. A dense step returns
rarely, carries the memories along, and the choice is made anew. A tensor that has shown nothing but
zeros, as where a loss starts late, travels whole until it shows more; then its dense steps begin.
One that was given little, and of which ever more is left to send, has a dense step before its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from ..collective import Collective, Gradient, Rounds, StepTimer, dtype_name
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
from .state import JointStep, StepStatus, Tensor, propose

_FORMAT = 6


@dataclass(frozen=True)
class _Step:
    """A step of some tensors, under way; norms : of the gradients of those that are looked at."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    joint: JointStep
    norms: Sequence[tuple[Tensor, float]]


class AllReduceExchange:
    """All tensors of one optimizer on one rank, by name.

    Parameters
    ----------
    ratio : float32 bytes of the gradients over bytes a rank adds to the sums, small tensors
        included; where even rank one for every matrix is more, that is what is sent
    warmup : dense steps at the start, at least 1
    every : steps from one dense step to the next after that
    min_elements : tensors below it are not taken, and no vectors below `limits.VECTOR`
    feedback, decay : whether what was not sent is remembered, and the factor on it
    frequencies : whether convolutions may travel by frequencies of their kernels
    traffic : a report.Traffic that is told what travels
    seconds : that is told how long it takes
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
        seconds: StepTimer | None = None,
        find_unused: bool = False,
        drops_unused: bool = False,
        pauses: bool = False,
    ) -> None:
        check_settings(ratio, warmup, every)
        self.ratio, self.warmup, self.every = ratio, warmup, every
        self.min_elements = min_elements
        self.exact = False  # ranks have unlike hardware
        self.decay = decay if feedback else 0.0
        self.frequencies = frequencies
        self.tensors: dict[str, Tensor] = {}
        self._left_out: dict[str, int] = {}  # elements
        self._ranks = 1  # of the last step
        self._verdicts: dict[str, tuple[StepStatus, str]] = {}  # how each tensor's last step ended
        self._traffic, self._seconds = traffic, seconds or StepTimer()
        self._find_unused, self._drops_unused, self._pauses = find_unused, drops_unused, pauses
        self._excluded: dict[str, Array] = {}  # memories that sit this step out

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor is for the exchange; one that is not travels plain, and is counted.

        Rims ask it for the gather exchange, too.
        """
        taken = is_large(shape, self.min_elements)
        if not taken:
            self._left_out[name] = math.prod(shape)
        return taken

    def dense(self, name: str, shape: Sequence[int]) -> bool:
        """Whether this tensor's next gradient travels uncompressed."""
        tensor = self._tensor(name, shape)
        tensor.wake()
        step = tensor.step
        return step < self.warmup or (step - self.warmup) % self.every == self.every - 1

    def dense_values(self, name: str, values: Array, *, wire: Any = None) -> Array:
        """Return what to send on a dense step, [n] of `wire`: the values and what was not sent yet.

        The rounding error of `wire` is carried over to later steps. wire : a dtype of the library
        of `values`; float32 by default
        """
        tensor = self._next(name)
        xp = namespace(values)
        vector = xp.astype(values, xp.float32)
        if (residual := tensor.residual()) is not None:
            vector = vector + asarray_like(residual, vector) * self.decay
        tensor.owed = None
        if wire in (None, xp.float32):
            return vector
        with full_fp32_matmul(vector):  # beyond half precision: the step is lost, and nothing owed
            sent = xp.astype(vector, wire)
            lost = vector - xp.astype(sent, xp.float32)
            lost = xp.where(xp.isfinite(lost), lost, xp.zeros_like(lost))
        if self.decay:
            tensor.owed = lost
        return sent

    def learn(self, name: str, mean: Array) -> None:
        """Take note of the mean gradient of a dense step, [n]; the same on every rank."""
        tensor = self.tensors[name]
        xp = namespace(mean)
        tensor.mean = xp.reshape(xp.astype(mean, xp.float32, copy=True), (-1,))
        tensor.earlier, tensor.summable = tensor.summable or tensor.earlier, None
        tensor.proposed = None

    def rounds(self, gradients: Sequence[Gradient], *, ranks: int, rank: int | None) -> Rounds:
        """Average gradients in their place, in a step that is dense for none of them.

        Behind a dense step there is one round more, the first, in which sizes travel; in a step of
        a vote one at the end. Without `rank`, on all ranks alike, no tensor is sent by rows, and
        each relies on its own sizes.
        """
        names = [str(gradient.name) for gradient in gradients]
        with self._seconds.coding():
            new = self._proposed(names, ranks, rank)
        return self._rounds(gradients, names, new, ranks=ranks, rank=rank)

    def _rounds(
        self,
        gradients: Sequence[Gradient],
        names: Sequence[str],
        new: Mapping[str, Allocation],
        *,
        ranks: int,
        rank: int | None,
    ) -> Rounds:
        nbytes, like = 0, gradients[0].values
        words: Array | None
        step: _Step | None = None
        voted: Sequence[Tensor] | None = None
        with self._seconds.coding():
            xp = namespace(like)
            # The same memory if they are float32.
            means = [numpy_view(xp.astype(g.values, xp.float32, copy=False)) for g in gradients]
            late = not on_host(means[0])
            self._exclude_unused(names, means)
        try:
            with self._seconds.coding():
                vectors = means
                if new and rank is not None:
                    if not late:
                        # By the time their words are made, the caller's may be others.
                        vectors = [namespace(vector).asarray(vector, copy=True) for vector in means]
                    words = encode_sizes(new, ranks=ranks, rank=rank)
                    self.tensors[names[0]].size_words = words.size
                else:
                    step = self._begin(names, vectors, new, means, ranks=ranks, rank=rank)
                    words = next(step.joint.rounds)
            while words is not None:
                if late and not nbytes:
                    # The last step has long ended; to ask at its end would have been to wait.
                    self._tell_lost(names)
                nbytes += words.nbytes
                (summed,) = yield [Collective("sum", asarray_like(words, like))]
                with self._seconds.coding():
                    total = numpy_view(summed, INT32)
                    if step is None:
                        shapes = {name: size.shape for name, size in new.items()}
                        new = decode_sizes(to_host(total), shapes, ranks=ranks)
                        step = self._begin(names, vectors, new, means, ranks=ranks, rank=rank)
                        words = next(step.joint.rounds)
                    elif voted is None:
                        try:
                            words = step.joint.rounds.send(total)
                        except StopIteration as ended:
                            voted = self._end(step, ended.value)
                            words = self._own_votes(step, voted)
                    else:
                        self._take_votes(voted, total)
                        words = None
            if self._pauses:
                yield []
        finally:
            self._include_unused(names)
        for gradient, mean in zip(gradients, means, strict=True):
            if dtype_name(gradient.values) != "float32":
                back = asarray_like(mean, gradient.values)
                gradient.values[...] = xp.astype(back, gradient.values.dtype)
        self._tell(gradients, nbytes, late=late)

    def _proposed(
        self, names: Sequence[str], ranks: int, rank: int | None
    ) -> dict[str, Allocation]:
        """Begin a step of tensors; sizes for those that have none, as this rank sees them."""
        self._ranks = ranks
        tensors = [self._next(name) for name in names]
        if any(tensor.summable is None and tensor.proposed is None for tensor in tensors):
            propose(
                self.tensors,
                sum(self._left_out.values()),
                ratio=self.ratio,
                min_elements=self.min_elements,
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
        """Take new sizes; the rounds of all these tensors."""
        for name, size in sizes.items():
            self.tensors[name].begin(size)
        tensors = [self.tensors[name] for name in names]
        xp = namespace(values[0])
        vectors = [
            times_power(xp.reshape(value, (-1,)), -tensor.exponent)
            for value, tensor in zip(values, tensors, strict=True)
        ]
        looked = [(t, v) for t, v in zip(tensors, vectors, strict=True) if looks(self._since(t))]
        joint = JointStep(
            [tensor.summable for tensor in tensors if tensor.summable is not None],
            vectors, ranks=ranks, rank=rank, decay=self.decay, exact=self.exact, outs=means,
        )  # fmt: skip
        # Norms before the means take the gradients' place.
        return _Step(names, tensors, joint, [(one, norm_of(vector)) for one, vector in looked])

    def _end(self, step: _Step, result: Result) -> list[Tensor]:
        """Keep what the rounds have made; the tensors on whose size ranks vote now."""
        means, status = step.joint.end(result)
        for mean, tensor in zip(means, step.tensors, strict=True):
            if tensor.exponent:
                put_all([mean], [times_power(mean, tensor.exponent)])
        for name in step.names:
            self._verdicts[name] = status, step.names[0]
        if on_host(means[0]):
            status.read()  # a damaged sum is an error of this step
        for tensor, mean in zip(step.tensors, means, strict=True):
            tensor.listen(mean)
        for tensor, norm in step.norms:
            if tensor.summable is not None:
                tensor.look(norm_of(tensor.summable.memory), norm)
        return [tensor for tensor, _ in step.norms if self._votes(tensor)]

    def _own_votes(self, step: _Step, voted: Sequence[Tensor]) -> Array | None:
        """Return this rank's votes on tensors; None where no rank votes."""
        if not voted:
            return None
        words = votes([self._outgrown(tensor) for tensor in voted])
        step.tensors[0].size_words += words.size
        return words

    def _take_votes(self, tensors: Sequence[Tensor], total: Array) -> None:
        for tensor, outgrown in zip(tensors, majority(to_host(total), len(tensors)), strict=True):
            if outgrown:
                tensor.step = self.warmup - 1

    # A framework drops the mean of a parameter that no rank has used, so nothing may be sent for
    # it. Elsewhere the memory of a rank without a gradient only waits.

    def _exclude_unused(self, names: Sequence[str], vectors: Sequence[Array]) -> None:
        """Keep the memory of what this rank has not used from travelling."""
        if not (self._drops_unused and (on_host(vectors[0]) or self._find_unused)):
            return
        for name, vector in zip(names, vectors, strict=True):
            summable = self.tensors[name].summable
            if summable is not None and not is_used(vector):
                self._excluded[name] = summable.exclude(namespace(vector).zeros_like(vector))

    def _include_unused(self, names: Sequence[str]) -> None:
        for name in names:
            summable = self.tensors[name].summable
            if name in self._excluded and summable is not None:
                summable.include(self._excluded.pop(name))

    def _tell_lost(self, names: Sequence[str]) -> None:
        if self._traffic is not None:
            for name in names:
                self._traffic.lost(*self.lost(name))

    def _tell(self, gradients: Sequence[Gradient], nbytes: int, *, late: bool) -> None:
        """Count a step; the words of all are counted with the first."""
        if self._traffic is None:
            return
        for gradient in gradients:
            name = str(gradient.name)
            energy, error = (0.0, 0.0) if late else self.lost(name)
            method = self.method(name)
            self._traffic.shared(name, gradient.elements, nbytes, energy, error, method=method)
            nbytes = 0

    def until_vote(self, name: str) -> int | None:
        """Steps before the next one in which ranks vote on a tensor's size; None if they do not."""
        tensor = self.tensors[name]
        since = self._since(tensor)
        return next_vote(since) - since - 1 if self._is_small(tensor) else None

    def _votes(self, tensor: Tensor) -> bool:
        """Whether ranks vote on a tensor in the step under way: all of them know it alike."""
        since = self._since(tensor)
        return next_vote(since - 1) == since and self._is_small(tensor)

    def _since(self, tensor: Tensor) -> int:
        """Steps behind the choice of a size."""
        return (tensor.step - self.warmup) % self.every

    def _is_small(self, tensor: Tensor) -> bool:
        even = math.prod(tensor.shape) / self.ratio
        return tensor.size is not None and is_small(tensor.size, even, self._ranks)

    def _outgrown(self, tensor: Tensor) -> bool:
        """Return this rank's vote: it holds more than others, and would get a larger size alone."""
        tensors = list(self.tensors.values())
        n, left_out = math.prod(tensor.shape), sum(self._left_out.values())
        even = budget(n, left_out * n / sum(math.prod(t.shape) for t in tensors), self.ratio)
        if tensor.size is None or not is_small(tensor.size, even, self._ranks):
            return False
        held = [t.held for t in tensors if t.held is not None and not self._is_small(t)]
        return tensor.held is not None and is_outgrown(tensor.held, held)

    def words(self, name: str, ranks: int) -> list[int]:
        """Return the 4-byte words that a tensor sends in each round, once its size is chosen.

        Words that agreed on sizes come first; of tensors in one exchange, the first counts them.
        """
        tensor = self.tensors[name]
        sizes = [tensor.size_words] if tensor.size_words else []
        return sizes + tensor.summable.words(ranks) if tensor.summable else []

    def stop(self, name: str) -> None:
        """Stop exchanging a tensor, on all ranks; what was not sent of it is kept."""
        tensor = self.tensors.get(name)
        if tensor is not None and tensor.summable is not None:
            residual = tensor.residual()
            self._next(name)
            tensor.summable, tensor.proposed, tensor.owed = None, None, residual

    def release(self, name: str) -> Floats:
        """What is owed of a tensor, [n], which now travels elsewhere; it is owed no more."""
        residual = self.residual(name) * np.float32(self.decay)
        tensor = self.tensors[name]
        tensor.open()
        tensor.owed = None
        return residual

    def lost(self, name: str) -> tuple[float, float]:
        """Squared norms of what the last step held, memory included, and of what is left of it.

        Of tensors that travelled together, the first one has them all, and the others none.
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
        """Keep what these tensors, or all, did so far: `abort` takes back what comes after."""
        for tensor in self._some(names):
            tensor.commit()

    def abort(self, names: Iterable[str] | None = None) -> None:
        """Remember of these tensors, or all, what was remembered after the last commit."""
        for tensor in self._some(names):
            tensor.abort()

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Abort a step that broke off, whose count is taken back, too; see Tensor.undo."""
        for tensor in self._some(names):
            tensor.undo()

    def _some(self, names: Iterable[str] | None) -> list[Tensor]:
        known = self.tensors
        return [known[name] for name in (known if names is None else names) if name in known]

    def rescale(self, factor: float) -> None:
        """Multiply what is of the size of gradients, as when a loss scaler changed its scale."""
        for name, tensor in self.tensors.items():
            self.change(name, lambda values: values * np.float32(factor))
            if tensor.summable is not None:
                tensor.summable.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit by bit; only the memories differ between ranks."""
        return {
            "format": _FORMAT,
            "left_out": dict(self._left_out),
            "tensors": {name: tensor.state_dict() for name, tensor in self.tensors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned; nothing changes if it does not fit."""
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
        """Return what this rank has not sent of `name` yet, [n] float32."""
        tensor = self.tensors.get(name)
        residual = None if tensor is None else tensor.residual()
        if residual is None:
            raise CompressError(f"there is no memory of {name!r}; known: {sorted(self.tensors)}")
        return np.array(to_host(residual))

    def change(self, name: str, function: Callable[[Floats], Floats]) -> None:
        """Put function(vector), [n] float32, in the place of all that is remembered of a tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return
        for kind in ("mean", "owed"):
            if (values := getattr(tensor, kind)) is not None:
                setattr(tensor, kind, function(to_host(values)))
        if tensor.summable is not None:
            tensor.replace(function(to_host(tensor.residual())))

    def move(self, name: str, function: Callable[[Floats], Floats]) -> None:
        """Restart a tensor whose layout, and thus matrix, has changed, and keep its residual.

        It begins with dense steps, as no direction is known.
        function : maps [n] float32 of the old layout to its new shape
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return
        residual = tensor.residual()
        lies = function(
            np.zeros(math.prod(tensor.shape), np.float32) if residual is None else to_host(residual)
        )
        self.tensors[name] = Tensor(lies.shape, owed=None if residual is None else lies.reshape(-1))

    def restart(self, residuals: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Forget all tensors except these residuals; shapes may differ from now on."""
        self._left_out.clear()
        self.tensors = {
            name: Tensor(residual.shape, owed=residual.reshape(-1).copy())
            for name, residual in residuals.items()
        }

    def sizes(self, state: dict[str, Any]) -> dict[str, int]:
        """Elements of each tensor in a saved state, by name.

        One that has sent all, as in a dense step, is among them: other ranks may not have.
        """
        return {name: math.prod(entry["shape"]) for name, entry in state["tensors"].items()}

    def unsent(self, name: str) -> Floats | None:
        """What this rank has not sent of a tensor, [n] float32; None if it does not know it."""
        if self.remembers(name):
            return self.residual(name)
        known = self.tensors.get(name)
        return None if known is None else np.zeros(math.prod(known.shape), np.float32)

    def load_with_residuals(self, state: dict[str, Any], residuals: Mapping[str, Floats]) -> None:
        """Load another rank's state, with these residuals, [n] each, in place of its own."""
        self.load_state_dict(state)
        for name, residual in residuals.items():
            if self.remembers(name) or residual.any():
                self.tensors[name].replace(residual.astype(np.float32))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise CompressError(f"a saved tensor is named {name!r}; expected a string")
    return name
