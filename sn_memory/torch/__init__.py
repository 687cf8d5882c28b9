"""sn_memory for torch: a model that trains within a budget of bytes, with the same gradients."""

# What is imported below needs the framework: without it, one sentence and no traceback into here.
# ruff: noqa: E402
from ..base.errors import PlanWarning, need

need("torch", "sn_memory.torch")

from ..run.estimate import Estimate
from ..run.planned import PlannedKind, Verification
from .activations.compress import CompressedActivations, compress_activations
from .activations.saving import Saved
from .errors import ReplayError, TraceError
from .estimate import estimate
from .host.buffers import PinnedState
from .host.files import HostState
from .model.tracker import StorageTracker
from .plan import plan
from .planned import Planned
from .policy.policy import SelectivePolicy, checkpoint_policy
from .target.allocator import placing_statistics, use_placing_allocator
from .trace.trace import Trace, trace
from .verify import verify

__all__ = [
    "CompressedActivations",
    "Estimate",
    "HostState",
    "PinnedState",
    "PlanWarning",
    "Planned",
    "PlannedKind",
    "ReplayError",
    "Saved",
    "SelectivePolicy",
    "StorageTracker",
    "Trace",
    "TraceError",
    "Verification",
    "checkpoint_policy",
    "compress_activations",
    "estimate",
    "placing_statistics",
    "plan",
    "trace",
    "use_placing_allocator",
    "verify",
]
