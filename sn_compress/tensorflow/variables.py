"""Identification of users' variables, variables inside graphs, and outcomes of gradients.

The outcome of an exchanged gradient is applied or dropped. TensorFlow has no hooks for optimizer
steps. But a variable whose gradient was applied has changed by its next exchange; if it is
bit-identical, the gradient was not applied, and its residual must not be sent later. For a variable
that was never seen to change, e.g. in a loop that only inspects gradients, the outcome is unknown:
its gradients count as applied.
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

# TensorFlow numbers equal names by what the process has created so far: "dense_4" on one rank may
# be "dense_7" on another.
_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?\Z", re.DOTALL)


def relative_names(names: Sequence[str]) -> list[str]:
    """Renumber each part of the names: "_4" becomes "#2" if two of its kind have lower numbers."""
    parts = [[_NUMBERED.match(part) for part in name.split("/")] for name in names]
    numbers: dict[str, set[int]] = {}
    for match in (match for pieces in parts for match in pieces if match):
        numbers.setdefault(match[1], set()).add(int(match[2] or 0))
    order = {kind: sorted(of_kind) for kind, of_kind in numbers.items()}
    return [
        "/".join(f"{m[1]}#{order[m[1]].index(int(m[2] or 0))}" for m in pieces if m)
        for pieces in parts
    ]


NO_VARIABLE = -1
_HANDLE = re.compile(r'ResourceHandle\(name="([^"]+)"')


def variable(value: Any) -> Any:
    """Create a variable in any trace: tf.function allows tf.Variable only in its first one."""
    with tf.init_scope():
        return ResourceVariable(value, trainable=False)


class Variables:
    """Variables whose gradients were exchanged, by slot: numbered in order of first exchange.

    The text of a handle contains a name such as "kernel/12", where 12 is TensorFlow's count of all
    variables in the process.
    """

    def __init__(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._names: list[str] = []
        self._saved: dict[int, str] = {}  # names in a loaded memory, by slot

    def slots(self, handles: Iterable[str]) -> list[int]:
        """Return the slots of variables, given the texts of their handles."""
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
        """Check the names in a memory to be loaded, and remember them.

        Raises CompressError if a variable has another name; for variables not known yet, their
        first exchange raises it.
        """
        pairs = [name.partition(":") for name in names]
        saved = {
            int(slot): f"{slot}:{name}" for slot, mark, name in pairs if mark and slot.isdecimal()
        }
        for slot, name in enumerate(self._names):
            _check_saved(saved, slot, name)
        self._saved = saved

    def knows(self, handle: str) -> bool:
        """Whether gradients of the variable with this handle were exchanged."""
        match = _HANDLE.search(handle)
        return match is not None and match[1] in self._slot_of

    def name(self, slot: int) -> str | None:
        """Return the key of a variable's memory, such as "0:kernel" for the first one."""
        return None if slot == NO_VARIABLE else self._names[slot]


def _check_saved(saved: Mapping[int, str], slot: int, name: str) -> None:
    if saved.get(slot, name) != name:
        raise CompressError(
            f"the saved memory is of {saved[slot]!r} where the gradient of {name!r} is exchanged; "
            "expected the same variables in the same order. Build the model, and call its tapes, "
            "as before saving; where variables have changed, begin without the memory."
        )


def fingerprint_of_variables(variables: Sequence[Any]) -> list[tuple[str, str]]:
    """Return names, shapes and dtypes of variables, in order."""
    paths = [str(getattr(v, "path", None) or getattr(v, "name", "")) for v in variables]
    names = relative_names([path.partition(":")[0] for path in paths])
    return [
        (f"variable {place}", f"{name} {tuple(v.shape)} {getattr(v.dtype, 'name', v.dtype)}")
        for place, (name, v) in enumerate(zip(names, variables, strict=True))
    ]


def as_variables(sources: Sequence[Any]) -> list[Any]:
    """Return the TensorFlow variables among the variables of a tape or Keras."""
    variables = [v if isinstance(v, tf.Variable) else getattr(v, "value", None) for v in sources]
    return [v for v in variables if isinstance(v, tf.Variable)]


# Digest of a variable at its last exchange (None before the first, or if the outcome is already
# known), and whether it was ever seen to change.
Mark = tuple[int | None, bool]
_NEVER, _EXCHANGED, _CHANGES = np.arange(3)  # int64


def digest_of(value: Any) -> Any:
    """Return a digest of all bits of a variable, [] int64."""
    # Rather than a copy of the variable, which would be a third copy of the model (decision 88).
    with tf.device("CPU"):  # the op has no GPU kernel
        return tf.reshape(tf.bitcast(tf.fingerprint(tf.reshape(value, [1, -1])), tf.int64), [])


class EngineOutcomes:
    """Outcomes for steps of the engine; see engine.transaction.Outcomes."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}
        self._now: dict[str, Outcome] = {}

    def note(self, names: Sequence[str], digests: Sequence[int] | None) -> bool:
        """Called before tensors' next exchange; return whether any last gradient was dropped.

        digests : of their variables; None if all count as applied
        """
        self._now = dict.fromkeys(names, "applied")
        if digests is not None:
            for name, digest in zip(names, digests, strict=True):
                before, changes = self.marks.get(name, (None, False))
                # A variable never seen to change may not be trained at all.
                if changes and before == digest:
                    self._now[name] = "dropped"
                seen = before is not None and before != digest
                self.marks[name] = digest, changes or seen
        return "dropped" in self._now.values()

    def unseen(self, names: Iterable[str]) -> None:
        """Count tensors' last gradients as applied: zero means do not change variables."""
        for name in names:
            if name in self.marks:
                self.marks[name] = None, self.marks[name][1]

    def sent(self, names: Iterable[str]) -> None:
        """Called by the engine: outcomes are unknown from here on."""
        self._now = {}

    def of(self, name: str) -> Outcome:
        """Called by the engine."""
        return self._now.get(name, "held")


class GraphOutcomes:
    """Outcomes as nodes of a graph, for a fixed list of tensors."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._digests = variable(np.array([digest or 0 for digest, _ in marks], np.int64))
        states = [
            _CHANGES if changes else _NEVER if digest is None else _EXCHANGED
            for digest, changes in marks
        ]
        self._states = variable(np.array(states, np.int64))

    def dropped(self, digests: Any) -> Any:
        """Return whether the last gradient of each tensor was dropped, [tensors] bool.

        Called once per step, with the digests of the variables, [tensors] int64.
        """
        before, states = self._digests.read_value(), self._states.read_value()
        changed = digests != before
        seen = changed & (states != _NEVER)
        self._digests.assign(digests)
        self._states.assign(tf.where(seen, _CHANGES, tf.maximum(states, _EXCHANGED)))
        return (states == _CHANGES) & ~changed

    def unseen(self, zeros: Any) -> None:
        """Count gradients as applied where the mean is zero, [tensors] bool; see EngineOutcomes."""
        digests, changes = self._digests.read_value(), self._states.read_value() == _CHANGES
        # Change the digest, so that the variable counts as changed.
        self._digests.assign(tf.where(zeros & changes, tf.bitwise.invert(digests), digests))

    def marks(self) -> list[Mark]:
        """Return the current marks."""
        pairs = zip(self._digests.numpy().tolist(), self._states.numpy().tolist(), strict=True)
        return [(None if state == _NEVER else digest, state == _CHANGES) for digest, state in pairs]
