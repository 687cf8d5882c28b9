"""sn_memory for torch: train a model within a memory budget, with the same gradients."""

# The imports below need torch: without it, the user gets one sentence instead of a traceback.
# ruff: noqa: E402
from typing import TYPE_CHECKING

from ..base.errors import PlanWarning, at_first_use, need

need("torch", "sn_memory.torch")

from ..run.estimate import Estimate
from ..run.planned import PlannedKind, Verification
from .errors import ReplayError, TraceError
from .estimate import estimate
from .model.tracker import StorageTracker
from .plan import plan
from .planned import PlanRecord
from .target.allocator import placing_statistics, use_placing_allocator
from .trace.trace import Trace, trace
from .verify import verify

if TYPE_CHECKING:
    from ..activations.saved import Saved
    from .activations.compress import CompressedActivations, compress_activations
    from .host.buffers import HostState, PinnedState
    from .policy.policy import SelectivePolicy, checkpoint_policy

# Loaded at first use (PEP 562), as a plan without state on the host needs none of them.
_HOME = {
    "CompressedActivations": ".activations.compress",
    "HostState": ".host.buffers",
    "PinnedState": ".host.buffers",
    "Saved": "..activations.saved",
    "SelectivePolicy": ".policy.policy",
    "checkpoint_policy": ".policy.policy",
    "compress_activations": ".activations.compress",
}
__all__ = [
    "CompressedActivations",
    "Estimate",
    "HostState",
    "PinnedState",
    "PlanRecord",
    "PlanWarning",
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

__getattr__, __dir__ = at_first_use(__name__, _HOME)
