"""sn_memory for torch: a model that trains within a budget of bytes, with the same gradients."""

from ..errors import PlanWarning
from ..estimate import Estimate
from .apply import Planned, plan
from .errors import ReplayError, TraceError
from .estimate import estimate
from .trace import Trace, trace
from .tracker import StorageTracker
from .verify import Verification, verify

__all__ = [
    "Estimate",
    "PlanWarning",
    "Planned",
    "ReplayError",
    "StorageTracker",
    "Trace",
    "TraceError",
    "Verification",
    "estimate",
    "plan",
    "trace",
    "verify",
]
