"""What a step will cost: layers, links, rates of codecs; and what to make of it while training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tuning import Tuner


def new_tuner(*args: Any, **options: Any) -> Tuner:
    """A `tuning.Tuner`; what it needs is loaded with the first one, as few jobs have one."""
    from .tuning import Tuner

    return Tuner(*args, **options)
