"""How many chunks a plan makes its loss in: the fewest seconds among those that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..base.sizes import parse_bytes
from ..graph.liveness import peak, unplanned_bytes
from .loss.model import chunk_loss, last_product, unchunked
from .trace.trace import trace

MOST_CHUNKS = 64


def with_loss_chunks(
    model: torch.nn.Module,
    sample: Any,
    budget: float | str,
    chunks: int | str | None,
    settings: Mapping[str, Any],
) -> tuple[torch.nn.Module, float | str, int]:
    """Return the model to plan, the budget and the number of chunks.

    A percentage becomes bytes: it is of the step as it was. With `auto` the step is traced in 1, 2,
    4, ... chunks; of those that fit without anything else the one of fewest op seconds is taken,
    and where none does, the one of the smallest peak, which the planner then goes on with.

    settings : of `trace`
    """
    if chunks is None:
        return model, budget, 1
    model = unchunked(model)
    if chunks != "auto" and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"got loss_chunks {chunks!r}, expected a number from 1, 'auto' or None.")
    plain = trace(model, sample, **settings).graph
    whole = peak(plain).bytes
    budget_bytes = parse_bytes(budget, whole=whole)
    if isinstance(chunks, int):
        chunked = chunk_loss(model, sample, chunks) if chunks > 1 else model
        return chunked, budget_bytes, chunks
    if whole <= budget_bytes or last_product(model, sample) is None:
        return model, budget_bytes, 1
    found: list[tuple[bool, float, int, int, torch.nn.Module]] = []
    number = 2
    while number <= MOST_CHUNKS:
        chunked = chunk_loss(model, sample, number)
        graph = trace(chunked, sample, **settings).graph
        held = unplanned_bytes(graph)
        fits = held <= budget_bytes
        seconds = float(sum(ways[0] for ways in graph.arrays.seconds))
        found.append((not fits, seconds if fits else float(held), number, held, chunked))
        # With more of them the largest is another tensor.
        if len(found) > 1 and held >= found[-2][3]:
            break
        number *= 2
    _, _, number, held, chunked = min(found, key=lambda it: it[:3])
    if held >= whole:
        return model, budget_bytes, 1
    return chunked, budget_bytes, number
