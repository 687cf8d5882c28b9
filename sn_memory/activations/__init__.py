"""Activations in fewer bits: how much error a gradient bears, and which bits that allows."""

from ..base.errors import AccuracyWarning
from .batch import BatchSuggestion, suggest_batch
from .controller import Controller
from .policy import Treatment, treatment
from .saved import Row
from .theory import coverage, error_tolerance, gradient_sd, paper_sd

__all__ = [
    "AccuracyWarning",
    "BatchSuggestion",
    "Controller",
    "Row",
    "Treatment",
    "coverage",
    "error_tolerance",
    "gradient_sd",
    "paper_sd",
    "suggest_batch",
    "treatment",
]
