"""Errors of planning torch models, and helpers for their messages.

TraceError(RuntimeError)    the model cannot be recorded, or not replayed as recorded; says where
SetsStateError(TraceError)  the forward pass sets Python state, which a replay would not do
SampleError(TraceError)     the model itself fails on the sample
ReplayError(RuntimeError)   a planned step cannot be carried out as traced
"""

from __future__ import annotations

import traceback
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class TraceError(RuntimeError):
    """The model cannot be recorded as a graph, or a replay would not do what the model does.

    The message says which call, and what to do. The model is left as it was.
    """


class SetsStateError(TraceError):
    """The forward pass sets attributes or writes to lists or objects, maybe only at first."""


class SampleError(TraceError):
    """The model itself fails on the sample, so that no other back end helps."""


# The text of the TraceError for a forward that sets the state of torch's generator.
SEEDS = (
    "the forward pass seeds torch's generator (torch.manual_seed, set_rng_state), which a replay "
    "of its calls would not do. Seed before the model is called."
)


class ReplayError(RuntimeError):
    """A planned step cannot be carried out: something is not as it was traced."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; for the CPU's, torch has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def innermost_line(where: TracebackType | FrameType | None) -> str:
    """Return the innermost line of the user's code, else of torch's layers, if there is one."""
    if isinstance(where, TracebackType):
        frames = list(traceback.walk_tb(where))
    else:
        # `walk_stack` begins with the innermost frame, `walk_tb` with the outermost.
        frames = list(traceback.walk_stack(where))[::-1] if where is not None else []
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames]
    own = [line for line in lines if "/torch/" not in line]
    # A model of torch's layers alone has no line of the user's; the layer's line names the layer.
    lines = own or [line for line in lines if "/torch/nn/modules/" in line]
    return lines[-1] if lines else "place unknown"


def sample_line(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe the arguments of a model: shapes and types of tensors, types of the rest."""

    def shown(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return f"a {type(value).__name__}"
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"

    return ", ".join(map(shown, tree_leaves((args, kwargs)))) or "no arguments"


def fails_on_sample(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException
) -> SampleError:
    """Return the error for a sample on which a model fails; it quotes the model's own error."""
    return SampleError(
        f"{name} does not run on the sample, {sample_line(args, kwargs)}: "
        f"{type(error).__name__}: {first_line(error).rstrip('.')}. Pass a sample that the model "
        "accepts, with the shapes, types and values it is trained on."
    )


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message."""
    return next((line for line in str(error).splitlines() if line.strip()), "no message")
