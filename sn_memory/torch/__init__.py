"""sn_memory for torch: a model that trains within a budget of bytes, with the same gradients."""

# What is imported below needs the framework: without it, one sentence and no traceback into here.
# ruff: noqa: E402
from ..base.errors import PlanWarning, need

need("torch", "sn_memory.torch")

from ..run.estimate import Estimate
from ..run.planned import PlannedKind
from ..run.verification import Verification
from .activations.compress import CompressedActivations, Peaks, Saved, compress_activations
from .device.placing import placing_statistics, use_placing_allocator
from .errors import ReplayError, TraceError
from .estimate import estimate
from .host.buffers import PinnedState
from .host.files import HostState
from .loss.compiled import ChunkedLossBackend
from .loss.function import chunked_cross_entropy
from .loss.model import chunk_loss
from .model.tracker import StorageTracker
from .plan import plan
from .planned import Planned
from .policy.policy import SelectivePolicy, checkpoint_policy
from .trace.trace import Trace, trace
from .verify import verify

__all__ = [
    "ChunkedLossBackend",
    "CompressedActivations",
    "Estimate",
    "HostState",
    "Peaks",
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
    "chunk_loss",
    "chunked_cross_entropy",
    "compress_activations",
    "estimate",
    "placing_statistics",
    "plan",
    "trace",
    "use_placing_allocator",
    "verify",
]
