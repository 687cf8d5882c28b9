"""What FSDP2 gathers of a model at once."""

from __future__ import annotations

import torch

from ...run.fit import Units


def units_of(model: torch.nn.Module) -> Units:
    """Return what FSDP2 gathers at once, if each block of the model is wrapped, and then the whole.

    Blocks are the members of the lists of modules that hold the most parameters.
    """

    def own(module: torch.nn.Module) -> int:
        return sum({id(it): it.nbytes for it in module.parameters()}.values())

    lists = [it for it in model.modules() if isinstance(it, torch.nn.ModuleList) and len(it) > 1]
    if not lists:
        return Units(0, own(model))
    blocks = max(lists, key=own)
    sizes = [own(it) for it in blocks]
    return Units(max(sizes), max(0, own(model) - sum(sizes)))
