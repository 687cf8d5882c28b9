"""What can go wrong between torch and the planner.

TraceError(RuntimeError)    the model cannot be recorded, or not replayed as recorded; says where
ReplayError(RuntimeError)   a planned step cannot be carried out as traced
"""

from __future__ import annotations


class TraceError(RuntimeError):
    """The model cannot be recorded as a graph, or a replay would not do what the model does.

    The message says which call, and what to do. The model is left as it was.
    """


class ReplayError(RuntimeError):
    """A planned step cannot be carried out: something is not as it was traced."""
