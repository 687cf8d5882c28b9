"""Transaction: the residuals of a step, committed or aborted.

What compression leaves out of a gradient travels with the next one, but must not if the gradient
was never applied. Whether it was is known late, and in several ways: an optimizer steps, a loss
scaler skips a step, a loop drops a gradient, an exception ends a step. All come down to the same
verbs. A step `begin`s; when the next one does, `settle` asks what became of it, and its residuals
are committed, aborted, or, where gradients accumulate over several exchanges, still open. A step
that broke off is aborted at once, by `undo`. (A step in which a rank has NaN leaves everything as
it was, on all ranks alike, as the words themselves tell: see allreduce/bucket.py.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, Protocol

# "held" where the gradient still waits for a step, as when gradients accumulate.
Outcome = Literal["applied", "dropped", "held", "unknown"]


class Outcomes(Protocol):
    """What became of exchanged gradients: a `torch.outcomes.Outcomes`."""

    def sent(self, names: Iterable[str]) -> None:
        """Note that gradients of these tensors are exchanged now."""

    def of(self, name: str) -> Outcome:
        """What became of the last gradient of a tensor."""


class Store(Protocol):
    """Memories by name: an ErrorFeedback, an AllReduceExchange."""

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Keep what was done so far: `abort` takes back what comes after."""

    def abort(self, names: Iterable[str] | None = None) -> None:
        """Remember what was remembered after the last commit."""

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Abort a step that broke off, on ranks that may have come to different places of it."""

    def rescale(self, factor: float) -> None:
        """Multiply what is of the size of gradients."""


class Check(Protocol):
    """What is known of a step once a device has computed it: a `payloads.DeferredCheck`."""

    def conclude(self) -> None:
        """PayloadError if what came was damaged."""


class Transaction:
    """The steps of one optimizer on one rank.

    Parameters
    ----------
    stores : all that is remembered
    outcomes, scaler : see Engine

    Attributes
    ----------
    scale : the unit of the memories, None before a scaler was asked
    aborted : gradients so far that were sent, and dropped
    checks : of the last step on a device
    """

    def __init__(self, stores: Sequence[Store], *, outcomes: Outcomes | None, scaler: Any) -> None:
        self.scaler, self.aborted = scaler, 0
        self.scale: float | None = None
        self.checks: list[Check] = []
        self._stores, self._outcomes = tuple(stores), outcomes
        self._open: set[str] = set()  # tensors that were sent and not committed since

    def begin(self, names: Collection[str]) -> None:
        """Note that gradients of these tensors are sent now."""
        self._open.update(names)
        if self._outcomes is not None:
            self._outcomes.sent(names)

    @property
    def held(self) -> frozenset[str]:
        """After `settle`: tensors whose last gradients are neither applied nor dropped yet."""
        return frozenset(self._open)

    def reopen(self, names: Collection[str]) -> None:
        """Count tensors as sent and not committed, after steps that a graph has run."""
        self._open.update(names)

    def commit(self, names: Collection[str]) -> None:
        """Keep the residuals of tensors: what was sent was applied, or is held in a gradient."""
        self._open.difference_update(names)
        for store in self._stores:
            store.commit(names)

    def abort(self, names: Collection[str]) -> None:
        """Restore the residuals of tensors to their last commit."""
        self._open.difference_update(names)
        self.aborted += len(names)
        for store in self._stores:
            store.abort(names)

    def undo(self, names: Collection[str]) -> None:
        """Undo a step that broke off; its gradients are counted when the next one begins."""
        for store in self._stores:
            store.undo(names)

    def settle(self) -> None:
        """Between passes: commit applied gradients, abort dropped ones; follow the loss scale.

        Raises PayloadError if a payload of the last step was corrupt, on a device.
        """
        # First, and only once each: what was decoded from damage is not committed.
        checks, self.checks = self.checks, []
        for check in checks:
            check.conclude()
        factor = self._scale_factor()
        outcomes = {name: self._outcome(name) for name in self._open}
        # A scaler lowers its scale after it has skipped a step, so then a gradient of unknown
        # outcome was dropped. Held gradients of one scale cannot be added to those of another: a
        # change of scale closes these, too.
        gone = ("dropped",) if factor >= 1 else ("dropped", "held", "unknown")
        done = ("applied", "unknown") if factor == 1 else ("applied", "unknown", "held")
        self.abort([name for name, outcome in outcomes.items() if outcome in gone])
        self.commit([name for name in self._open if outcomes[name] in done])
        if factor != 1:
            for store in self._stores:
                store.rescale(factor)

    def forget(self) -> None:
        """Forget open steps, as another state has been loaded."""
        self._open.clear()
        self.checks.clear()

    def _scale_factor(self) -> float:
        """The scaler's scale over the one at the last step."""
        if self.scaler is None:
            return 1.0
        before, self.scale = self.scale, float(self.scaler.get_scale())
        return 1.0 if before is None else self.scale / before

    def _outcome(self, name: str) -> Outcome:
        return "unknown" if self._outcomes is None else self._outcomes.of(name)
