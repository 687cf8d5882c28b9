"""Planners of the literature under their own names, for users and for comparison with `auto`.

Each is a function `(graph, budget_bytes) -> Plan`; a budget of None asks for the least memory that
the policy reaches, `dtr` and `liveness` for none of their own. Each raises BudgetError with the
least peak it found where it cannot keep a budget: none of them searches as `auto` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..graph import Graph
from ..plan import Plan
from .chen import greedy, sqrt_n
from .dtr import dtr
from .keep import liveness
from .knapsack import knapsack
from .superneurons import superneurons, superneurons_memory, superneurons_speed
from .vdnn import offload_conv

Policy = Callable[[Graph, int | None], Plan]

POLICIES: Final[dict[str, Policy]] = {
    "liveness": liveness,
    "superneurons_speed": superneurons_speed,
    "superneurons_memory": superneurons_memory,
    "superneurons": superneurons,
    "sqrt_n": sqrt_n,
    "greedy": greedy,
    "offload_conv": offload_conv,
    "dtr": dtr,
    "knapsack": knapsack,
}
