"""Prediction of step times from layers, links and codec rates; tuning from it while training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tuning import Tuner


def new_tuner(*args: Any, **options: Any) -> Tuner:
    """Create a `tuning.Tuner`; imported lazily, as few jobs need one."""
    from .tuning import Tuner

    return Tuner(*args, **options)
