"""Error feedback: what one step dropped is added to the next.

A sparsifier without memory loses small coefficients for good. With one, they add up until they are
large enough to travel, and any contraction converges (Stich, Cordonnier, Jaggi 2018; Karimireddy et
al. 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _cuda
from ..arrays import on_cuda
from ..codecs import registry
from ..codecs.base import Codec, Payload, as_vector
from ..errors import CompressError
from ..saved import held, reading

_FORMAT = 2


class ErrorFeedback:
    """A codec with an error memory per tensor name.

    Parameters
    ----------
    codec : the codec that encodes all tensors; or, for codecs bound to a shape, a function from a
        tensor's name to its codec, called once for each name
    decay : factor on the memory before it is added, in (0, 1]; 1 keeps everything

    Attributes
    ----------
    undoable : whether to keep what `abort` needs, a copy of every memory; initially False

    Examples
    --------
    >>> from sn_compress import FFTCodec, codec
    >>> feedback = ErrorFeedback(FFTCodec(theta=0.9))
    >>> payload = feedback.encode("layer.weight", np.ones(5000, np.float32))

    >>> shapes = {"layer.weight": (50, 100), "out.weight": (10, 50)}
    >>> feedback = ErrorFeedback(lambda name: codec("axes", shape=shapes[name], axes=(0,)))
    >>> payload = feedback.encode("out.weight", np.ones(500, np.float32))
    >>> feedback.codec_of("out.weight").decode(payload).shape
    (500,)
    """

    def __init__(self, codec: Codec | Callable[[str], Codec], *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise CompressError(
                f"decay={decay!r}; expected above 0 and at most 1 (1 forgets nothing)"
            )
        self.decay = decay
        self._codec_for = (lambda name: codec) if isinstance(codec, Codec) else codec
        self._codecs: dict[str, Codec] = {}
        # Elements and the codec's state; None until a state is needed.
        self._memory: dict[str, tuple[int, Any]] = {}
        self.undoable = False
        # Copies from before the first uncommitted encoding; and buffers of earlier copies, to be
        # reused.
        self._committed: dict[str, tuple[int, Any]] = {}
        self._spare: dict[str, Any] = {}

    def codec_of(self, name: str) -> Codec:
        """Return the codec that encodes `name` and decodes its payloads."""
        if name not in self._codecs:
            self._codecs[name] = self._codec_for(name)
        return self._codecs[name]

    def encode(self, name: str, values: npt.ArrayLike, *, codec: Codec | None = None) -> Payload:
        """Encode `values` plus the memory of `name`, and store the new residual.

        codec : replaces the codec of `name` for this step; must have the same basis, e.g. an
            FFTCodec with another theta
        Raises CompressError if `name` was used with another number of elements.
        """
        known = self.codec_of(name)
        codec = codec or known
        # The meaning of a state depends on the class and the basis of its codec.
        if (type(codec), codec.basis) != (type(known), known.basis):
            raise CompressError(
                f"the error memory of {name!r} is that of {known!r}; expected this codec, or one "
                f"with the same kind of memory; got {codec!r}"
            )
        array: Any = values if on_cuda(values) else as_vector(values)
        n, memory = self._find(name, array)
        self._open(name, n, memory)
        payload = codec.encode(array, state=memory, decay=self.decay)
        self._memory[name] = n, memory
        return payload

    def memory_of(self, name: str, like: Any) -> Any:
        """Return the codec's state for `name`, on the device of `like`; updated by encoding.

        Raises CompressError if `name` was used with another number of elements.
        """
        n, memory = self._find(name, like)
        self._open(name, n, memory)
        self._memory[name] = n, memory
        return memory

    def replace(self, name: str, memory: Any) -> None:
        """Replace the codec's state for `name`, which must have one."""
        self._memory[name] = self._memory[name][0], memory

    def _find(self, name: str, like: Any) -> tuple[int, Any]:
        codec = self.codec_of(name)
        size = _cuda.view(like).elements if _cuda.takes(like) else int(like.shape[0])
        n, memory = self._memory.get(name) or (size, None)
        if n != size:
            raise CompressError(
                f"{name!r} has {size} elements; its memory has {n}. Names must be unique "
                "and shapes constant; call forget(name) after changing a layer."
            )
        if memory is None:
            memory = codec.new_state(size)
        return n, codec.place_state(memory, like)

    def _open(self, name: str, n: int, memory: Any) -> None:
        """Save a copy for `abort`, as codecs update their state in place."""
        if self.undoable and name not in self._committed:
            self._committed[name] = n, _copied(memory, self._spare.pop(name, None))

    def residual(self, name: str) -> npt.NDArray[np.float32]:
        """Return what was dropped of `name` so far and not sent since, [n] float32."""
        if name not in self._memory:
            raise CompressError(f"nothing was encoded for {name!r}; known: {sorted(self._memory)}")
        n, memory = self._memory[name]
        if memory is None:
            return np.zeros(n, np.float32)
        return self.codec_of(name).state_to_values(memory, n)

    def remembers(self, name: str) -> bool:
        """Whether anything was encoded for `name`."""
        return name in self._memory

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Keep what was encoded so far for these names, or all: `abort` restores this point."""
        for name in list(self._committed) if names is None else names:
            if name in self._committed:
                _, self._spare[name] = self._committed.pop(name)

    def abort(self, names: Iterable[str] | None = None) -> None:
        """Restore the memories of these names, or all, to the last commit."""
        for name in list(self._committed) if names is None else names:
            if name in self._committed:
                self._memory[name] = self._committed.pop(name)

    undo = abort  # there are no step counts to revert

    def reopen(self, name: str, memory: Any) -> None:
        """Set what `abort` restores: the codec's state before a step that a graph has run."""
        self._committed[name] = self._memory[name][0], memory

    def settled(self, names: Iterable[str]) -> None:
        """Commit these names, and free the buffers of their copies."""
        for name in names:
            self._committed.pop(name, None)
            self._spare.pop(name, None)

    def rescale(self, factor: float) -> None:
        """Multiply all memories, e.g. when a loss scaler has changed its scale."""
        for name, (_, memory) in self._memory.items():
            if memory is not None:
                self._set(name, self.residual(name) * np.float32(factor))

    def _set(self, name: str, residual: npt.NDArray[np.float32]) -> None:
        self._memory[name] = residual.size, self.codec_of(name).values_to_state(residual)

    def change(self, name: str, function: Callable[[Any], Any]) -> None:
        """Replace a memory by function(residual), [n] float32, if there is one."""
        if self.remembers(name):
            self._set(name, function(self.residual(name)))

    def sizes(self, state: dict[str, Any]) -> dict[str, int]:
        """Return the number of elements of each memory in a saved state, by name."""
        return {name: registry.elements(entry) for name, entry in state["memory"].items()}

    def unsent(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return a tensor's residual on this rank, [n] float32; None if it is unknown here."""
        return self.residual(name) if self.remembers(name) else None

    def load_with_residuals(
        self, state: dict[str, Any], residuals: Mapping[str, npt.NDArray[np.float32]]
    ) -> None:
        """Load another rank's state, with its residuals replaced by these, [n] each."""
        self.load_state_dict(state)
        for name, residual in residuals.items():
            self._set(name, residual)

    def restart(self, residuals: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Discard everything except these residuals; shapes may differ from now on."""
        self._memory.clear()
        self._committed.clear()
        self._spare.clear()
        self._codecs.clear()  # some are bound to a shape
        for name, residual in residuals.items():
            self._set(name, residual.reshape(-1))

    def forget(self, name: str) -> None:
        """Drop the memory and the codec of `name`; no error if there are none."""
        self._memory.pop(name, None)
        self._codecs.pop(name, None)

    def state_dict(self, aborted: Collection[str] = ()) -> dict[str, Any]:
        """Return everything needed to resume bit by bit, as arrays, numbers and strings.

        It differs between ranks: save one per rank.

        aborted : names whose memories are saved as `abort` would restore them
        """
        kept = {name: self._committed[name] for name in aborted if name in self._committed}
        memory = {
            name: registry.save(self.codec_of(name), state, n)
            for name, (n, state) in (self._memory | kept).items()
            if state is not None
        }
        return {"format": _FORMAT, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; nothing changes if it does not fit.

        If it was saved with another codec or other settings, it is converted through residuals.
        """
        with reading("the saved memories"):
            self._memory = self._read(state)

    def snapshot(self) -> dict[str, tuple[int, Any]]:
        """Return what loading replaces, for `restore` if something else cannot be loaded."""
        return self._memory

    def restore(self, snapshot: dict[str, tuple[int, Any]]) -> None:
        """Undo loading."""
        self._memory = snapshot

    def _read(self, state: dict[str, Any]) -> dict[str, tuple[int, Any]]:
        held(state)
        memory = state.get("memory") if isinstance(state, dict) else None
        if not isinstance(memory, dict) or state.get("format") != _FORMAT:
            raise CompressError(
                f"not a state of format {_FORMAT} with a memory by name: {type(state).__name__}; "
                "expected what state_dict() returned, unchanged"
            )
        known, loaded = dict(self._codecs), {}
        try:
            for name, entry in memory.items():
                loaded[name] = self._load(name, entry)
        except BaseException:
            self._codecs = known  # loading has created codecs for names that may not exist
            raise
        return loaded

    def _load(self, name: str, entry: dict[str, Any]) -> tuple[int, Any]:
        if not isinstance(name, str):
            raise CompressError(f"a saved memory is named {name!r}; expected a string")
        try:
            codec = self.codec_of(name)
        except LookupError as error:
            raise CompressError(
                f"the saved state has a memory of {name!r}, for which there is no codec ({error}). "
                "Take it out of the state's memory, or give it a codec."
            ) from error
        try:
            return registry.elements(entry), registry.load(codec, entry)
        except CompressError as error:
            raise CompressError(f"memory of {name!r} cannot be loaded: {error}") from error


def _copied(memory: Any, into: Any) -> Any:
    """Copy a codec's state, into the arrays of another state if they fit."""
    if not (isinstance(memory, list) and isinstance(into, list)) or _kinds(memory) != _kinds(into):
        return copy.deepcopy(memory)
    for part, target in zip(memory, into, strict=True):
        target[...] = part
    return into


def _kinds(parts: list[Any]) -> list[Any]:
    return [(type(p), getattr(p, "shape", None), getattr(p, "dtype", None)) for p in parts]
