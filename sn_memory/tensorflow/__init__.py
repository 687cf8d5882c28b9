"""sn_memory for TensorFlow: training within a budget of bytes, with the same gradients."""

# What is imported below needs the framework: without it, one sentence and no traceback into here.
# ruff: noqa: E402
from ..base.errors import PlanWarning, need

need("tensorflow", "sn_memory.tensorflow")

from ..run.estimate import Estimate
from ..run.planned import Verification
from .activations.compress import CompressedActivations, compress_activations
from .chunked_loss import chunked_cross_entropy
from .errors import TraceError
from .estimate import estimate
from .memory import Allocations, AllocatorPeak
from .plan import plan, plan_step
from .planned import Planned, PlannedStep
from .trace.trace import Trace, trace
from .verify import verify

__all__ = [
    "Allocations",
    "AllocatorPeak",
    "CompressedActivations",
    "Estimate",
    "PlanWarning",
    "Planned",
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
