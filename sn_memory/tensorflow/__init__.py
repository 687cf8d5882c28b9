"""sn_memory for TensorFlow: train a model within a memory budget, with the same gradients."""

# The imports below need TensorFlow; without it, the user gets one sentence, not a traceback.
# ruff: noqa: E402
from typing import TYPE_CHECKING

from ..base.errors import PlanWarning, at_first_use, need

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

__getattr__, __dir__ = at_first_use(__name__, _HOME)
