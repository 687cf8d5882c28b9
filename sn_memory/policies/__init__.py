"""The historical planners, by name; each is a module with one function.

    plan(graph: Graph, *, budget_bytes: int | None) -> Plan

It may ignore the budget (then its plan says what it needs), must not raise where its method simply
finds nothing (then it returns the plan that keeps everything), and its plans pass `check_plan`.
`plan_graph(..., planner="auto")` takes all of them as candidates, so it is never slower than any of
them at the same peak. To add one: a module here, its name in `_MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Final, Protocol

from ..graph import Graph
from ..plan import Plan


class Policy(Protocol):
    """What a policy module's `plan` is."""

    def __call__(self, graph: Graph, *, budget_bytes: int | None) -> Plan: ...


# Public name to module of this package.
_MODULES: Final[dict[str, str]] = {
    "liveness": "liveness",
}


def names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of the table."""
    return tuple(_MODULES)


def policy(name: str) -> Policy:
    """Return the policy of this name; raises KeyError for a name there is not."""
    module = import_module(f".{_MODULES[name]}", __name__)
    found: Callable[..., Plan] = module.plan
    return found
