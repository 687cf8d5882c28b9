"""sn_memory for TensorFlow: training within a budget of bytes, with the same gradients."""

# What is imported below needs the framework: without it, one sentence and no traceback into here.
# ruff: noqa: E402
from importlib import import_module
from typing import TYPE_CHECKING

from ..base.errors import PlanWarning, need

need("tensorflow", "sn_memory.tensorflow")

from ..run.estimate import Estimate
from ..run.planned import Verification
from .errors import TraceError
from .estimate import estimate
from .memory import Allocations
from .plan import plan, plan_step
from .planned import PlannedStep, PlanRecord
from .trace.trace import Trace, trace
from .verify import verify

if TYPE_CHECKING:
    from .activations import CompressedActivations, compress_activations
    from .chunked_loss import chunked_cross_entropy

# Loaded at first use (PEP 562): no plan needs them.
_HOME = {
    "CompressedActivations": ".activations",
    "chunked_cross_entropy": ".chunked_loss",
    "compress_activations": ".activations",
}
__all__ = [
    "Allocations",
    "CompressedActivations",
    "Estimate",
    "PlanRecord",
    "PlanWarning",
    "PlannedStep",
    "Trace",
    "TraceError",
    "Verification",
    "chunked_cross_entropy",
    "compress_activations",
    "estimate",
    "plan",
    "plan_step",
    "trace",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
