"""Planners from the literature that sn_memory does not contain, and all planners by name.

from rivals.planners import PLANNERS
plan = PLANNERS["dtr"](graph, budget_bytes=1 << 30)      # a sn_memory.Plan

They are functions as those of `sn_memory.plan.policies`, with the same contract. sn_memory's own
planner does not ask them: docs/decisions/0075 says why.
"""

from __future__ import annotations

from typing import Final

from sn_memory.plan.policies import Policy, names, policy

from .dtr import dtr
from .greedy import greedy
from .knapsack import knapsack
from .vdnn import offload_conv

RIVALS: Final[dict[str, Policy]] = {
    "greedy": greedy,
    "offload_conv": offload_conv,
    "dtr": dtr,
    "knapsack": knapsack,
}
# Those of the package first.
PLANNERS: Final[dict[str, Policy]] = {name: policy(name) for name in names()} | RIVALS
