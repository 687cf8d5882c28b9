"""Activations in fewer bits: how much error a gradient bears, and which bits that allows."""

from ..base.errors import AccuracyWarning
from .controller import BatchSuggestion, Controller, suggest_batch
from .saved import Row, Treatment, coverage, error_tolerance, gradient_sd, treatment

__all__ = [
    "AccuracyWarning",
    "BatchSuggestion",
    "Controller",
    "Row",
    "Treatment",
    "coverage",
    "error_tolerance",
    "gradient_sd",
    "suggest_batch",
    "treatment",
]
