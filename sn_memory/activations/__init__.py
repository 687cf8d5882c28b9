"""Activation compression: how much error a gradient tolerates, and the bits that this allows."""

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
