"""Policies for a step that torch.compile makes: what is promised is what Inductor's kernels hold.

Fused kernels make fewer values than eager ops do, so the eager peak is too high a promise. Results
are chosen by the eager step, as ever, and each choice is compiled and run once; where
that holds more or less than was asked for, it is chosen anew with so much less or more.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...base.progress import report_progress
from .choose import Chooser, Found
from .predict import Selection

# Choices that are measured for one budget and one cut.
_TRIES = 4
# So near below the budget a choice is near enough.
_NEAR = 0.01


def shell(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the modules of a model, with its own parameters and buffers in them."""
    known: dict[int, torch.nn.Module] = {}

    def copied(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) not in known:
            made = known[id(module)] = object.__new__(type(module))
            made.__dict__.update(module.__dict__)
            made.__dict__["_modules"] = {
                name: it and copied(it) for name, it in module._modules.items()
            }
        return known[id(module)]

    return copied(model)


class CompiledPeaks:
    """Peaks of a model under torch.compile, by what its blocks save.

    Parameters
    ----------
    model, arguments
        As in `compiled_peak`.
    held
        Bytes beside the step.
    wrapped
        Puts checkpoints into a model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        held: int,
        wrapped: Callable[[torch.nn.Module, Selection], torch.nn.Module],
    ) -> None:
        self.model, self.arguments, self.held, self.wrapped = model, arguments, held, wrapped
        self.measured = 0
        self.whole = self.of({}) - held

    def of(self, selection: Selection) -> int:
        """Return the peak with a selection; it is compiled and run for it."""
        self.measured += 1
        report_progress("compile", self.measured, self.measured + 1)
        made = self.wrapped(shell(self.model), selection)
        # Not before it is asked for: torch.compile takes seconds to import.
        dry_run: Any = importlib.import_module(".dry_run", __package__)
        return int(dry_run.compiled_peak(made, self.arguments)) + self.held

    def found(self, chooser: Chooser, found: Found) -> Found:
        """Return what was found, with the peak it has when compiled."""
        peak = self.of(chooser.selection(found.choice)) - self.held
        return replace(found, step=replace(found.step, peak_bytes=peak))

    def within(self, chooser: Chooser, nothing: Found, budget_bytes: int) -> Found | None:
        """Return the quickest choice found whose compiled step keeps a budget.

        nothing : what is held when nothing is saved, measured
        budget_bytes : without `held`
        """
        if nothing.step.peak_bytes > budget_bytes:
            return None
        best = nothing
        if self.whole <= budget_bytes:
            # All is kept: that is the step without a policy.
            everything = chooser.within(1 << 62)
            assert everything is not None
            return replace(everything, step=replace(everything.step, peak_bytes=self.whole))
        # What is saved costs the same bytes either way, so the peaks move together.
        asked = budget_bytes + chooser.nothing.step.peak_bytes - nothing.step.peak_bytes
        low, high = chooser.nothing.step.peak_bytes, 1 << 62
        for _ in range(_TRIES):
            eager = chooser.within(asked)
            if eager is None:
                break
            measured = self.found(chooser, eager)
            over = measured.step.peak_bytes - budget_bytes
            if over <= 0:
                low = max(low, asked)
                if measured.rerun_s < best.rerun_s:
                    best = measured
                if -over <= _NEAR * budget_bytes or not measured.rerun_s:
                    break
            else:
                high = min(high, asked)
            asked = min(max(asked - over, low + 1), high - 1)
            if asked <= low or asked >= high:
                break
        return best
