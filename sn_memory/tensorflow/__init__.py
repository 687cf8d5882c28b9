"""sn_memory for TensorFlow: training within a budget of bytes, with the same gradients."""

from .apply import Planned, PlannedStep, PlanWarning, plan, plan_step
from .errors import TraceError
from .memory import AllocatorPeak
from .trace import Trace, trace

__all__ = [
    "AllocatorPeak",
    "PlanWarning",
    "Planned",
    "PlannedStep",
    "Trace",
    "TraceError",
    "plan",
    "plan_step",
    "trace",
]
