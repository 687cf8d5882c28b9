"""What can go wrong between TensorFlow and the planner.

TraceError(RuntimeError)    the step cannot be traced, or not carried out as traced; says where
"""

from __future__ import annotations


class TraceError(RuntimeError):
    """The model or step cannot be traced as a graph, or not be carried out again as traced.

    The message says which op, and what to do. The model or step is left as it was.
    """
