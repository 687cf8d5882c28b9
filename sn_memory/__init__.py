"""sn_memory: training in far fewer bytes held.

The public names are loaded at first use (PEP 562), so `import sn_memory` costs a few milliseconds
and loads neither NumPy nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .check import Replay as Replay
    from .check import check_plan as check_plan
    from .drafting import plan_from_decisions as plan_from_decisions
    from .errors import BudgetError as BudgetError
    from .errors import CapacityError as CapacityError
    from .errors import GraphError as GraphError
    from .errors import MissingExtra as MissingExtra
    from .errors import PackError as PackError
    from .errors import PlanError as PlanError
    from .graph import Compressed as Compressed
    from .graph import Device as Device
    from .graph import Graph as Graph
    from .graph import Op as Op
    from .graph import Storage as Storage
    from .graph import Workspace as Workspace
    from .plan import Decision as Decision
    from .plan import Plan as Plan
    from .plan import Step as Step
    from .planner import plan_front as plan_front
    from .planner import plan_graph as plan_graph
    from .pool import Packing as Packing
    from .pool import arrange as arrange
    from .pool import pack as pack
    from .pool_check import check_packing as check_packing
    from .pool_plan import plan_buffers as plan_buffers

_HOME = {
    "BudgetError": ".errors",
    "CapacityError": ".errors",
    "Compressed": ".graph",
    "Decision": ".plan",
    "Device": ".graph",
    "Graph": ".graph",
    "GraphError": ".errors",
    "MissingExtra": ".errors",
    "Op": ".graph",
    "PackError": ".errors",
    "Packing": ".pool",
    "Plan": ".plan",
    "PlanError": ".errors",
    "Replay": ".check",
    "Step": ".plan",
    "Storage": ".graph",
    "Workspace": ".graph",
    "arrange": ".pool",
    "check_packing": ".pool_check",
    "check_plan": ".check",
    "pack": ".pool",
    "plan_buffers": ".pool_plan",
    "plan_from_decisions": ".drafting",
    "plan_front": ".planner",
    "plan_graph": ".planner",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
