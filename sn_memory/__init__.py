"""sn_memory: train within a memory budget.

Public names are loaded at first use (PEP 562), so `import sn_memory` takes a few milliseconds
and loads neither NumPy nor any framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.errors import at_first_use

if TYPE_CHECKING:
    from . import settings as settings
    from .base.errors import CapacityError as CapacityError
    from .base.errors import GraphError as GraphError
    from .base.errors import MissingExtra as MissingExtra
    from .base.errors import PackError as PackError
    from .base.errors import PlanError as PlanError
    from .base.progress import Progress as Progress
    from .check import Replay as Replay
    from .check import check_packing as check_packing
    from .check import check_plan as check_plan
    from .graph.graph import Graph as Graph
    from .graph.records import Device as Device
    from .graph.records import Op as Op
    from .graph.records import Storage as Storage
    from .graph.records import Workspace as Workspace
    from .plan.api import plan_front as plan_front
    from .plan.api import plan_graph as plan_graph
    from .plan.buffers import plan_buffers as plan_buffers
    from .plan.plan import Action as Action
    from .plan.plan import BudgetError as BudgetError
    from .plan.plan import Decision as Decision
    from .plan.plan import Plan as Plan
    from .pool.pack import Packing as Packing
    from .pool.pack import arrange as arrange
    from .pool.pack import pack as pack

__version__ = "0.1.0"

_HOME = {
    "BudgetError": ".plan.plan",
    "CapacityError": ".base.errors",
    "Decision": ".plan.plan",
    "Device": ".graph.records",
    "Graph": ".graph.graph",
    "GraphError": ".base.errors",
    "MissingExtra": ".base.errors",
    "Op": ".graph.records",
    "PackError": ".base.errors",
    "Packing": ".pool.pack",
    "Plan": ".plan.plan",
    "PlanError": ".base.errors",
    "Progress": ".base.progress",
    "Replay": ".check",
    "Action": ".plan.plan",
    "Storage": ".graph.records",
    "Workspace": ".graph.records",
    "arrange": ".pool.pack",
    "check_packing": ".check",
    "check_plan": ".check",
    "pack": ".pool.pack",
    "plan_buffers": ".plan.buffers",
    "plan_front": ".plan.api",
    "plan_graph": ".plan.api",
    "settings": ".",
}
__all__ = sorted(_HOME)

__getattr__, __dir__ = at_first_use(__name__, _HOME)
