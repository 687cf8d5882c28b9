"""Apoptosis for TensorFlow: a Keras model and its optimizer shrink together while they train."""

# The imports below need TensorFlow: without it, the user gets one sentence, not a traceback.
# ruff: noqa: E402
from ...base.errors import need

need("tensorflow", "sn_memory.apoptosis.tensorflow")

from ..pace import AgreementError, Event, Merged
from .shrink import Apoptosis, rebuild

__all__ = ["AgreementError", "Apoptosis", "Event", "Merged", "rebuild"]
