"""Error feedback: what one step dropped is added to the next.

A sparsifier without memory loses the small coefficients for good. With it, they add up until
they are large enough to travel, and any contraction converges (Stich, Cordonnier, Jaggi 2018;
Karimireddy et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .codecs import _device
from .codecs.fft import FFTCodec
from .contract import Payload, as_vector
from .errors import CompressError

_FORMAT = 1


class ErrorFeedback:
    """A codec and, per name, the memory of what it dropped.

    Parameters
    ----------
    codec : the codec that encodes
    decay : factor on the memory before it is added, in (0, 1]; 1 keeps everything

    Examples
    --------
    >>> feedback = ErrorFeedback(FFTCodec(theta=0.9))
    >>> payload = feedback.encode("layer.weight", np.ones(5000, np.float32))
    """

    def __init__(self, codec: FFTCodec, *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise CompressError(
                f"decay={decay!r}; expected above 0 and at most 1 (1 forgets nothing)"
            )
        self.codec = codec
        self.decay = decay
        self._memory: dict[str, tuple[int, Any]] = {}

    def encode(self, name: str, values: npt.ArrayLike) -> Payload:
        """Encode `values` plus the memory of `name`, and remember what was lost.

        Raises CompressError if `name` was used with another number of elements.
        """
        array: Any = values if _device.holds(values) else as_vector(values)
        return self.codec.encode(array, state=self.memory_of(name, array), decay=self.decay)

    def memory_of(self, name: str, like: Any) -> Any:
        """The memory of `name` where the vector `like` is, to be given to the codec as its state.

        Raises CompressError if `name` was used with another number of elements.
        """
        size = int(like.shape[0])
        n, memory = self._memory.get(name) or (size, self.codec.new_state(size))
        if n != size:
            raise CompressError(
                f"{name!r} has {size} elements; its memory has {n}. Names must be unique "
                "and shapes constant; call forget(name) after changing a layer."
            )
        if _device.holds(like):  # where new or loaded memory belongs
            memory = _device.to_device(memory, like)
        self._memory[name] = n, memory
        return memory

    def scale(self, factor: float) -> None:
        """Multiply all memory: gradients come in other units from now on."""
        for _, memory in self._memory.values():
            for part in memory:
                part *= np.float32(factor)

    def residual(self, name: str) -> npt.NDArray[np.float32]:
        """What has been dropped so far for `name` and not been sent, [n] float32."""
        if name not in self._memory:
            raise CompressError(f"nothing was encoded for {name!r}; known: {sorted(self._memory)}")
        n, memory = self._memory[name]
        return self.codec.state_to_values(_device.to_host(memory), n)

    def forget(self, name: str) -> None:
        """Drop the memory of `name`; no error if there is none."""
        self._memory.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit by bit, as arrays, numbers and strings.

        It differs from rank to rank: save one per rank.
        """
        memory = {
            name: {"n": n, "coefficients": _device.to_host(parts)}
            for name, (n, parts) in self._memory.items()
        }
        return {"format": _FORMAT, "basis": self.codec.basis, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; nothing changes if it does not fit.

        Saved with another block size or transform, it goes through the inverse transform.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise CompressError(
                f"not a state of format {_FORMAT}: {type(state).__name__}; expected what "
                "state_dict() returned, unchanged"
            )
        try:
            saved = FFTCodec(**state["basis"])
            entries = {
                name: self._entry(name, entry, saved) for name, entry in state["memory"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise CompressError(
                f"the saved state is incomplete ({type(error).__name__}: {error}); expected what "
                "state_dict() returned, unchanged"
            ) from error
        self._memory = entries

    def _entry(self, name: str, entry: dict[str, Any], saved: FFTCodec) -> tuple[int, Any]:
        n = int(entry["n"])
        if n < 0:
            raise CompressError(f"memory of {name!r} is of {n} elements; expected 0 or more")
        parts = [np.array(part, np.float32, order="C") for part in entry["coefficients"]]
        shapes, expected = ([p.shape for p in some] for some in (parts, saved.new_state(n)))
        if shapes != expected:
            raise CompressError(
                f"memory of {name!r} has shapes {shapes}; expected {expected} for {n} elements. "
                "The saved state is incomplete."
            )
        if not all(np.isfinite(part).all() for part in parts):
            raise CompressError(
                f"memory of {name!r} holds NaN or Inf, which would never leave it; the file is "
                "damaged. Load another one, or start without."
            )
        if saved.basis != self.codec.basis:
            parts = self.codec.values_to_state(saved.state_to_values(parts, n))
        return n, parts


def mean_of_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of what ErrorFeedback.state_dict returned on each rank.

    For another number of ranks: when every new rank starts with it, the mean over the ranks of
    what is still to be sent is what it was. A name that a rank does not have counts as zero.
    Raises CompressError if the states have not the same format, settings and shapes.
    """
    if not states:
        raise CompressError("the mean of no states; expected those of all ranks")
    first = states[0]
    total: dict[str, dict[str, Any]] = {}
    try:
        for state in states:
            if any(state[key] != first[key] for key in ("format", "basis")):
                raise CompressError("states of different settings; expected those of one run")
            for name, entry in state["memory"].items():
                parts = [np.asarray(part, np.float64) for part in entry["coefficients"]]
                if name in total:
                    so_far = total[name]["coefficients"]
                    parts = [a + b for a, b in zip(so_far, parts, strict=True)]
                total[name] = {"n": entry["n"], "coefficients": parts}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CompressError):
            raise
        raise CompressError(
            f"the saved states do not fit each other ({type(error).__name__}: {error}); expected "
            "what state_dict() returned on each rank, unchanged"
        ) from error
    for entry in total.values():
        entry["coefficients"] = [(p / len(states)).astype("f4") for p in entry["coefficients"]]
    return {"format": first["format"], "basis": first["basis"], "memory": total}
