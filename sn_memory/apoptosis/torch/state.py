"""Which of the tensors that torch.optim keeps of a parameter mean what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch

# Where gradients that are still to be applied lie while neurons merge.
CARRIED: Final = "sn_memory.carried"
KINDS: Final[Mapping[str, Literal["mean", "square"]]] = {
    CARRIED: "mean",
    "momentum_buffer": "mean",
    "exp_avg": "mean",
    "exp_avg_sq": "square",
    "max_exp_avg_sq": "square",
    "square_avg": "square",
    "sum": "square",
}


def unknown_state(parameter: torch.Tensor, state: dict[str, object]) -> str | None:
    """Return the name of a state tensor that is neither a number nor shaped like the parameter."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
            return key
    return None
