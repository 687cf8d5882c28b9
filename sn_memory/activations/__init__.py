"""Activations in fewer bits: how much error a gradient bears, and which bits that allows."""

from ..base.errors import AccuracyWarning
from .controller import Controller
from .saved import Row, Treatment, Unit, treatment
from .savings import BatchSuggestion, Peaks, suggest_batch
from .theory import coverage, error_tolerance, gradient_sd, paper_sd

__all__ = [
    "AccuracyWarning",
    "BatchSuggestion",
    "Controller",
    "Peaks",
    "Row",
    "Treatment",
    "Unit",
    "coverage",
    "error_tolerance",
    "gradient_sd",
    "paper_sd",
    "suggest_batch",
    "treatment",
]
