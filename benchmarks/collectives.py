"""Collectives that a step starts, in any thread, with the bytes that a rank contributes to each."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import profiler
from torch._C._profiler import _ExperimentalConfig

from sn_compress.prediction.cost import wire_bytes

KINDS = {
    "gloo:all_reduce": "allreduce",
    "gloo:all_gather": "allgather",
    "gloo:_all_gather_base": "allgather",
}
# As the profiler spells the types of tensors.
WIDTH = {
    "unsigned char": 1, "signed char": 1, "short": 2, "c10::Half": 2, "c10::BFloat16": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8,
}  # fmt: skip


def collectives(step: Callable[[], object]) -> list[tuple[str, int]]:
    """Kind and bytes of all collectives of `step()` over Gloo, in the order of their starts.

    torch's own hooks start some of theirs in Gloo's threads, so the profiler follows all of them.
    Raises ValueError for a collective or type whose bytes are not known here.
    """
    config = _ExperimentalConfig(profile_all_threads=True)
    with profiler.profile(record_shapes=True, experimental_config=config) as seen:
        step()
    calls = []
    for event in seen.profiler.kineto_results.events():
        if not event.name().startswith("gloo:") or event.name() == "gloo:barrier":
            continue
        types = set(event.dtypes())
        if event.name() not in KINDS or not types or not types <= set(WIDTH):
            raise ValueError(
                f"{event.name()} of {event.dtypes()}: add what it sends to KINDS, WIDTH"
            )
        sizes = zip(event.dtypes(), event.shapes(), strict=True)
        calls.append((KINDS[event.name()], sum(WIDTH[kind] * prod(shape) for kind, shape in sizes)))
    return calls


def sent_bytes(calls: list[tuple[str, int]], ranks: int) -> float:
    """Bytes that leave a rank in rings; see sn_compress.prediction.cost."""
    return sum(wire_bytes(kind, size, ranks) for kind, size in calls)  # type: ignore[arg-type]
