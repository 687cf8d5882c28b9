"""SuperNeurons' planners, the liveness it starts from, and sqrt(n), by name.

    (graph: Graph, *, budget_bytes: int | None) -> Plan

It may ignore the budget, must not raise where its method simply finds nothing (then it returns
the plan of least peak it has), and its plans pass `check_plan`.
`plan_graph(..., planner="auto")` begins from the plan of `sqrt_n`. Other planners of the literature
are in `benchmarks/rivals/planners`, which compares with them. What they share is in `plan/walk.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final

from ..plan import Plan

Policy = Callable[..., Plan]
# Public name to module of this package and function there.
_FUNCTIONS: Final[dict[str, tuple[str, str]]] = {
    "liveness": ("superneurons", "liveness"),
    "superneurons_speed": ("superneurons", "speed_centric"),
    "superneurons_memory": ("superneurons", "memory_centric"),
    "superneurons": ("superneurons", "cost_aware"),
    "sqrt_n": ("sqrt_n", "sqrt_n"),
}


def names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of the table."""
    return tuple(_FUNCTIONS)


def policy(name: str) -> Policy:
    """Return the policy of this name; raises KeyError for a name there is not."""
    module, function = _FUNCTIONS[name]
    found: Policy = getattr(import_module(f".{module}", __name__), function)
    return found
