"""Variables: those of graphs, and a user's, by which gradients are kept and ranks compared.

What became of exchanged gradients: applied, or dropped.

TensorFlow announces no steps of optimizers. But a variable whose gradient was applied is another
one at its next exchange; where it is the same, bit by bit, nobody applied the gradient, and what
compression left out of it must not be sent later. A variable that was never seen to change is
unknown, as where a loop only looks at gradients: its gradients count as applied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from ..engine.transaction import Outcome
from ..errors import CompressError

# Equal names are numbered by what a process has created so far: "dense_4" on one rank may be
# "dense_7" on another.
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?\Z", re.DOTALL)


def relative_names(names: Sequence[str]) -> list[str]:
    """Each name with "_4" as "#2" if two of its kind here have lower numbers, part by part."""
    parts = [[_NUMBERED.match(part) for part in name.split("/")] for name in names]
    numbers: dict[str, set[int]] = {}
    for match in (match for pieces in parts for match in pieces if match):
        numbers.setdefault(match[1], set()).add(int(match[2] or 0))
    order = {kind: sorted(those) for kind, those in numbers.items()}
    return [
        "/".join(f"{m[1]}#{order[m[1]].index(int(m[2] or 0))}" for m in of if m) for of in parts
    ]


NO_VARIABLE = -1
_HANDLE = re.compile(r'ResourceHandle\(name="([^"]+)"')


def variable(value: Any) -> Any:
    """A variable made in any trace: tf.function lets tf.Variable be made in its first only."""
    with tf.init_scope():
        return ResourceVariable(value, trainable=False)


class Variables:
    """Those whose gradients were exchanged, by slots: numbers in order of their first exchange.

    In the text of a handle is a name such as "kernel/12", whose second part is TensorFlow's count
    of all variables of the process.
    """

    def __init__(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._names: list[str] = []
        self._saved: dict[int, str] = {}  # names in a memory that was loaded, by slots

    def slots(self, handles: Iterable[str]) -> list[int]:
        """Those of variables, by the texts of their handles."""
        slots = []
        for handle in handles:
            match = _HANDLE.search(handle)
            if match is None:
                raise CompressError(
                    f"the handle {handle} of a variable shows no name; expected one as "
                    "TensorFlow 2.21 writes it. Please report your version of TensorFlow."
                )
            if match[1] not in self._slot_of:
                slot = len(self._names)
                name = f"{slot}:{match[1].rpartition('/')[0]}"
                _check_saved(self._saved, slot, name)
                self._slot_of[match[1]] = slot
                self._names.append(name)
            slots.append(self._slot_of[match[1]])
        return slots

    def expect(self, names: Collection[str]) -> None:
        """Take the names of a memory that is loaded.

        Raises CompressError if a variable has another one; where that is not known yet, its first
        exchange does.
        """
        pairs = [name.partition(":") for name in names]
        saved = {
            int(slot): f"{slot}:{name}" for slot, mark, name in pairs if mark and slot.isdecimal()
        }
        for slot, name in enumerate(self._names):
            _check_saved(saved, slot, name)
        self._saved = saved

    def knows(self, handle: str) -> bool:
        """Whether gradients of a variable of this handle were exchanged."""
        match = _HANDLE.search(handle)
        return match is not None and match[1] in self._slot_of

    def name(self, slot: int) -> str | None:
        """What the memory of a variable is kept under: "0:kernel" for the first one."""
        return None if slot == NO_VARIABLE else self._names[slot]


def _check_saved(saved: Mapping[int, str], slot: int, name: str) -> None:
    if saved.get(slot, name) != name:
        raise CompressError(
            f"the saved memory is of {saved[slot]!r} where the gradient of {name!r} is exchanged; "
            "expected the same variables in the same order. Build the model, and call its tapes, "
            "as before saving; where variables have changed, begin without the memory."
        )


def fingerprint_of_variables(variables: Sequence[Any]) -> list[tuple[str, str]]:
    """Their names, shapes and types, in order."""
    paths = [str(getattr(v, "path", None) or getattr(v, "name", "")) for v in variables]
    names = relative_names([path.partition(":")[0] for path in paths])
    return [
        (f"variable {place}", f"{name} {tuple(v.shape)} {getattr(v.dtype, 'name', v.dtype)}")
        for place, (name, v) in enumerate(zip(names, variables, strict=True))
    ]


def as_variables(sources: Sequence[Any]) -> list[Any]:
    """Those of TensorFlow among what a tape or Keras calls variables."""
    variables = [v if isinstance(v, tf.Variable) else getattr(v, "value", None) for v in sources]
    return [v for v in variables if isinstance(v, tf.Variable)]


# Digest of a variable at its last exchange, None before the first, or where what became of that is
# known; whether it was seen to change.
Mark = tuple[int | None, bool]
_NEVER, _EXCHANGED, _CHANGES = np.arange(3)  # int64


def digest_of(value: Any) -> Any:
    """Digest of all bits of a variable, [] int64."""
    # Not a copy of the variable: that would be a third copy of the model (decision 88).
    with tf.device("CPU"):  # there is no other kernel
        return tf.reshape(tf.bitcast(tf.fingerprint(tf.reshape(value, [1, -1])), tf.int64), [])


class EngineOutcomes:
    """Those that the engine is told of; see engine.transaction.Outcomes."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}
        self._now: dict[str, Outcome] = {}

    def note(self, names: Sequence[str], digests: Sequence[int] | None) -> bool:
        """Before the next gradients of tensors: whether any of the last ones were dropped.

        digests : of their variables; None where all count as applied
        """
        self._now = dict.fromkeys(names, "applied")
        if digests is not None:
            for name, digest in zip(names, digests, strict=True):
                before, changes = self.marks.get(name, (None, False))
                # One that was never seen to change may not be trained at all.
                if changes and before == digest:
                    self._now[name] = "dropped"
                seen = before is not None and before != digest
                self.marks[name] = digest, changes or seen
        return "dropped" in self._now.values()

    def unseen(self, names: Iterable[str]) -> None:
        """Count the last gradients of tensors as applied: means of zeros change no variable."""
        for name in names:
            if name in self.marks:
                self.marks[name] = None, self.marks[name][1]

    def sent(self, names: Iterable[str]) -> None:
        """Called by the engine: from here on nobody knows."""
        self._now = {}

    def of(self, name: str) -> Outcome:
        """Called by the engine."""
        return self._now.get(name, "held")


class GraphOutcomes:
    """As nodes of a graph, for tensors in one order."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._digests = variable(np.array([digest or 0 for digest, _ in marks], np.int64))
        states = [
            _CHANGES if changes else _NEVER if digest is None else _EXCHANGED
            for digest, changes in marks
        ]
        self._states = variable(np.array(states, np.int64))

    def dropped(self, digests: Any) -> Any:
        """Whether the last gradient of each tensor was dropped, [tensors] bool.

        Called once a step, with the digests of the variables, [tensors] int64.
        """
        before, states = self._digests.read_value(), self._states.read_value()
        changed = digests != before
        seen = changed & (states != _NEVER)
        self._digests.assign(digests)
        self._states.assign(tf.where(seen, _CHANGES, tf.maximum(states, _EXCHANGED)))
        return (states == _CHANGES) & ~changed

    def unseen(self, zeros: Any) -> None:
        """Count as applied the gradients whose means are zeros, [tensors] bool, as above."""
        digests, changes = self._digests.read_value(), self._states.read_value() == _CHANGES
        # Another digest, so that it will be a change.
        self._digests.assign(tf.where(zeros & changes, tf.bitwise.invert(digests), digests))

    def marks(self) -> list[Mark]:
        """As of now."""
        pairs = zip(self._digests.numpy().tolist(), self._states.numpy().tolist(), strict=True)
        return [(None if state == _NEVER else digest, state == _CHANGES) for digest, state in pairs]
