"""A training step that runs as planned: what `plan_step` returns."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..plan.plan import Plan
from .eager.program import Emission, Program
from .planned import Planned
from .trace.trace import Trace


class PlannedStep:
    """A training step that runs as planned.

    Parameters
    ----------
    plain
        The step before.
    traced, made
        Its trace and plan.

    Attributes
    ----------
    sn_memory
        Trace, plan and report, as of a planned model.
    """

    def __init__(self, plain: Any, traced: Trace, made: Plan) -> None:
        self.plain = plain
        program = Program(traced.captured, traced.named, made)
        self.sn_memory = Planned("graph", traced, made, {None: program})
        captured = traced.captured
        specs = [
            tf.TensorSpec(captured.tensors[it].shape, captured.tensors[it].dtype)
            for it in captured.arguments
        ]

        def run(*given: Any) -> list[Any]:
            emission = Emission(program, list(given))
            emission.forward()
            return [emission.need(value) for value in captured.outputs]

        self._run = tf.function(run, autograph=False, input_signature=specs)

    def put_together(self) -> None:
        """Put the planned ops into a graph; the first call finds it there."""
        self._run.get_concrete_function()

    def __call__(self, *args: Any) -> Any:
        """Run the step; arguments as of the sample, results as of the plain step."""
        given = [it for it in tf.nest.flatten(args, expand_composites=True) if _is_tensor(it)]
        results = iter(self._run(*given))
        structure = self.sn_memory.trace.structure
        return tf.nest.map_structure(
            lambda it: next(results) if isinstance(it, tf.Tensor) else it,
            structure,
            expand_composites=True,
        )


def _is_tensor(value: Any) -> bool:
    return (
        hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, tf.Variable)
    )
