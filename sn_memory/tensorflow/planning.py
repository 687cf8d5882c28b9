"""How a Keras model is planned for an input that comes while training: what `plan` was told.

The planned model keeps it, so that it can be planned once more, at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..check.replay import check_plan
from ..cost.bfc import BFCSettings
from ..graph.graph import Graph
from ..plan.plan import Plan
from ..run.at_once import SEARCH_S
from .eager.program import Program
from .model.settings import Settings
from .trace.trace import Trace


@dataclass(frozen=True)
class Planning:
    """How to plan a model for an input; the parameters are those of `plan`.

    `sample` is what it was planned for, with tf.TensorSpec in the place of tensors; of several, the
    largest. `plan_graph` is the one of `sn_memory`, handed in: what carries plans out need not know
    how they are found. `allocator` is that of a GPU, where it is planned for one.
    """

    planner: str
    techniques: tuple[str, ...]
    strict: bool
    deterministic: bool
    sample: tuple[Any, ...]
    plan_graph: Callable[..., Plan]
    allocator: BFCSettings | None = None

    def search(self, budget_bytes: int) -> Callable[[Graph], Plan]:
        """Return what plans a graph within a budget, in about SEARCH_S."""

        def planned(graph: Graph) -> Plan:
            made = self.plan_graph(
                graph,
                budget_bytes,
                planner=self.planner,
                techniques=self.techniques,
                time_limit_s=SEARCH_S,
                deterministic=self.deterministic,
                from_sqrt_n=False,
            )
            check_plan(graph, made)
            return made

        return planned


def put_together(traced: Trace, made: Plan, held: Settings) -> Program:
    """Return a plan of a model's trace as a program.

    held : settings of layers that are constants of the trace
    """
    program = Program(traced.captured, traced.named, made)
    program.has_gradient = tuple(it is not None for it in traced.structure["gradients"])
    program.results = traced.structure["results"]
    program.settings = held
    return program
