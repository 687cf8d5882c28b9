"""Whether a model and an optimizer are the plain ones, and not what a wrapper made of them."""

from __future__ import annotations

from typing import Any

from torch import nn


def check_plain(model: nn.Module, optimizer: Any) -> None:
    """Raise ValueError for what keeps tables of parameters that will be replaced."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod")
    if wrapped:
        raise ValueError(
            f"Apoptosis: got a {type(model).__name__}, expected the model inside it: parameters "
            "are replaced, and a wrapper keeps the old ones. Give the plain model, and wrap it "
            "again when step() returns true."
        )
    if hasattr(optimizer, "_allreduce_delay"):
        raise ValueError(
            "Apoptosis: got an optimizer wrapped by Horovod, expected the one inside it: the "
            "wrapper keeps tables of the old parameters. Give the plain optimizer."
        )
