"""Apoptosis for torch: a model and its optimizer shrink together while they train."""

# The imports below need torch: without it, the user gets one sentence instead of a traceback.
# ruff: noqa: E402
from ...base.errors import need

need("torch", "sn_memory.apoptosis.torch")

from ..pace import AgreementError, Event, Merged
from .shrink import Apoptosis, rebuild

__all__ = ["AgreementError", "Apoptosis", "Event", "Merged", "rebuild"]
