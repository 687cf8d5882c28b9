"""sn_memory for TensorFlow: training within a budget of bytes, with the same gradients."""

from ..activations import Peaks
from ..base.errors import PlanWarning
from ..run.estimate import Estimate
from .activations import CompressedActivations, compress_activations
from .allocations import Allocations
from .apply import plan
from .errors import TraceError
from .estimate import estimate
from .memory import AllocatorPeak
from .planned import Planned
from .step import PlannedStep, plan_step
from .trace import Trace, trace
from .verify import Verification, verify

__all__ = [
    "Allocations",
    "AllocatorPeak",
    "CompressedActivations",
    "Estimate",
    "Peaks",
    "PlanWarning",
    "Planned",
    "PlannedStep",
    "Trace",
    "TraceError",
    "Verification",
    "compress_activations",
    "estimate",
    "plan",
    "plan_step",
    "trace",
    "verify",
]
