"""What can go wrong, as exceptions.

    GraphError(ValueError)      a graph, or its file, that says something impossible
    PlanError(ValueError)       a plan, or its file, that cannot be carried out on its graph
    BudgetError(RuntimeError)   no plan keeps the budget; carries the smallest peak and its op

Every message has four parts: what failed, what was got, what was expected, what to do.
"""

from __future__ import annotations


class GraphError(ValueError):
    """A graph, or the file it is read from, that says something impossible."""


class PlanError(ValueError):
    """A plan, or the file it is read from, that cannot be carried out on its graph."""


class BudgetError(RuntimeError):
    """No plan keeps the budget.

    Attributes
    ----------
    peak_bytes
        The smallest peak that a plan was found for.
    budget_bytes
        The budget that was asked for.
    op
        The name of the op whose working set makes that smallest peak.
    """

    def __init__(self, message: str, *, peak_bytes: int, budget_bytes: int, op: str) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
        self.op = op
