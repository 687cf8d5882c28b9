"""Apoptosis for TensorFlow: a Keras model and its optimizer shrink together while they train."""

from ...run.agreement import AgreementError
from ..events import Event, Merged
from .export import rebuild
from .shrink import Apoptosis

__all__ = ["AgreementError", "Apoptosis", "Event", "Merged", "rebuild"]
