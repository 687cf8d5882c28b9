"""Apoptosis for TensorFlow: a Keras model and its optimizer shrink together while they train."""

# What is imported below needs the framework: without it, one sentence and no traceback into here.
# ruff: noqa: E402
from ...base.errors import need

need("tensorflow", "sn_memory.apoptosis.tensorflow")

from ..pace import AgreementError, Event, Merged
from .shrink import Apoptosis, rebuild

__all__ = ["AgreementError", "Apoptosis", "Event", "Merged", "rebuild"]
