"""What a rank holds under FSDP2, from what one process holds without it.

Activations are the same. Parameters and gradients are shards; beside them lie what FSDP2 gathers
and reduces in: the parameters of the block that runs, first as one flat block and then one by one,
in the backward pass those of the block before it too, which are asked for ahead, and the gradients
of the block, once as autograd makes them and once as they are handed to the reduction. What belongs
to no block stays gathered from the first forward to the last backward op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .predict import Stretch


def sharded_peak(
    model: torch.nn.Module, blocks: Iterable[str], stretches: Sequence[Stretch], ranks: int
) -> int:
    """Return the most live bytes of a rank; each block is a unit, all else another.

    stretches : of a step in one process, with the blocks as they run
    """
    if ranks < 1:
        raise ValueError(f"got ranks {ranks!r}, expected 1 or more.")
    units: dict[str, int] = {}
    counted: set[int] = set()
    for path in blocks:
        own = [it for it in model.get_submodule(path).parameters() if id(it) not in counted]
        units[path] = sum(it.nbytes for it in own)
        counted |= {id(it) for it in own}
    whole = sum(it.nbytes for it in model.parameters())
    rest = whole - sum(units.values())
    largest = max(units.values(), default=0)
    order = [it.path for it in stretches if it.path and it.phase == "forward"]
    found = 0
    for stretch in stretches:
        held = stretch.peak_bytes - whole - stretch.gradient_bytes
        shards = (whole + stretch.gradient_bytes) / ranks
        if stretch.phase == "forward":
            gathered = 2 * units.get(stretch.path, 0)
        else:
            place = order.index(stretch.path)
            ahead = units[order[place - 1]] if place else 0
            # Its own gathered parameters, those asked for ahead, and its gradients' reduction.
            gathered = units[stretch.path] + 2 * ahead + units[stretch.path]
        found = max(found, round(held + shards + rest + min(gathered, 4 * largest)))
    return found
