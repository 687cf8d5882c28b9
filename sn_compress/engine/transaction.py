"""Transaction: the residuals of a step, committed or aborted.

The residual of a gradient is sent with the next one, but must not be if the gradient was never
applied. Whether it was is known only later, and in several ways: an optimizer steps, a loss scaler
skips a step, a loop drops a gradient, an exception ends a step. All are handled by the same verbs.
A step `begin`s; when the next one does, `settle` determines the outcome, and the step's residuals
are committed, aborted, or, if gradients accumulate over several exchanges, stay open. A step that
failed is aborted immediately, by `undo`. (A step in which a rank has NaN changes nothing, on any
rank, as the words themselves show it: see allreduce/bucket.py.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, Protocol

# "held": the gradient still waits for an optimizer step, e.g. when gradients accumulate.
Outcome = Literal["applied", "dropped", "held", "unknown"]


class Outcomes(Protocol):
    """Outcomes of exchanged gradients, e.g. a `torch.outcomes.Outcomes`."""

    def sent(self, names: Iterable[str]) -> None:
        """Note that gradients of these tensors are exchanged now."""

    def of(self, name: str) -> Outcome:
        """Return the outcome of a tensor's last gradient."""


class Store(Protocol):
    """Memories by name: an ErrorFeedback, an AllReduceExchange."""

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Keep all changes so far: `abort` reverts only later ones."""

    def abort(self, names: Iterable[str] | None = None) -> None:
        """Restore the memories of the last commit."""

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Abort a step that failed, on ranks that may have reached different points of it."""

    def rescale(self, factor: float) -> None:
        """Multiply everything that scales with gradients."""


class Check(Protocol):
    """A check of a step, available once a device has computed it: a `payloads.DeferredCheck`."""

    def conclude(self) -> None:
        """Raise PayloadError if what was received is corrupt."""


class Transaction:
    """The steps of one optimizer on one rank.

    Parameters
    ----------
    stores : all memories
    outcomes, scaler : see Engine

    Attributes
    ----------
    scale : loss scale of the memories, None before the scaler was first read
    aborted : number of gradients that were sent and then dropped
    checks : of the last step on a device
    """

    def __init__(self, stores: Sequence[Store], *, outcomes: Outcomes | None, scaler: Any) -> None:
        self.scaler, self.aborted = scaler, 0
        self.scale: float | None = None
        self.checks: list[Check] = []
        self._stores, self._outcomes = tuple(stores), outcomes
        self._open: set[str] = set()  # tensors sent and not committed since

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
        """Keep the residuals of tensors whose gradients were applied, or are held in `.grad`."""
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
        """Undo a failed step; its gradients are counted when the next one begins."""
        for store in self._stores:
            store.undo(names)

    def settle(self) -> None:
        """Between passes, commit applied gradients, abort dropped ones, and track the loss scale.

        Raises PayloadError if a payload of the last step was corrupt, on a device.
        """
        # First, so that nothing decoded from corrupt payloads is committed; each only once.
        checks, self.checks = self.checks, []
        for check in checks:
            check.conclude()
        factor = self._scale_factor()
        outcomes = {name: self._outcome(name) for name in self._open}
        # A scaler lowers its scale after skipping a step, so a gradient of unknown outcome was
        # dropped then. Held gradients of one scale cannot be added to those of another, so a change
        # of scale closes these as well.
        gone = ("dropped",) if factor >= 1 else ("dropped", "held", "unknown")
        done = ("applied", "unknown") if factor == 1 else ("applied", "unknown", "held")
        self.abort([name for name, outcome in outcomes.items() if outcome in gone])
        self.commit([name for name in self._open if outcomes[name] in done])
        if factor != 1:
            for store in self._stores:
                store.rescale(factor)

    def forget(self) -> None:
        """Discard open steps, because another state has been loaded."""
        self._open.clear()
        self.checks.clear()

    def _scale_factor(self) -> float:
        """Return the scaler's scale over that of the last step."""
        if self.scaler is None:
            return 1.0
        before, self.scale = self.scale, float(self.scaler.get_scale())
        return 1.0 if before is None else self.scale / before

    def _outcome(self, name: str) -> Outcome:
        return "unknown" if self._outcomes is None else self._outcomes.of(name)
