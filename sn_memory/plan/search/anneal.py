"""Choices by simulated annealing: better ones are kept, at first also slightly worse ones.

Greedy fitting only lets go, and is stuck near the floor, where the plan that fits holds something
dear for a moment, drops it, and brings it back just in time. Here a choice may be over the budget
on the way. Bytes too many have a price that rises while it is over and falls while it is within,
so that the search swings about what just fits (annealing: Kirkpatrick et al., 1983; strategic
oscillation: Glover, 1977). Rebuilds and stays on the host are chosen together, by the replayed
time of ops and lanes.

The compiled extension (csrc/memory/annealing.cpp) does this at five microseconds a try on a graph
of a hundred ops, a few hundred on thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...base.clock import late_or_units
from ...graph.holes import Holes
from ..compiled import compiled
from .mixed import Mixed, carried

# Heat, in shares of the first seconds: what a try may lose at the start, and at the end.
COLD = 1e-5


@dataclass(frozen=True)
class Rules:
    """What an annealing may do.

    Parameters
    ----------
    budget_bytes
        To be kept by what is found.
    offload, recompute
        Whether holes may be spent on the host; whether storages may be made again.
    tries
        Changes to try; the heat falls over all of them.
    warm
        Heat at the start.
    seed
        Of the random numbers.
    wait
        Whether holes are tried on the host with ops that wait for the copies.
    """

    budget_bytes: int
    offload: bool
    recompute: bool
    tries: int
    warm: float
    seed: int = 0
    wait: bool = True


def anneal(holes: Holes, start: Mixed, rules: Rules, *, deadline: float) -> Mixed | None:
    """Return the fastest found within the budget; where there is none, the smallest peak found.

    None where the last word cannot be carried out, which the start can.
    """
    device = holes.graph.device
    lanes = (0.0, 0.0, 0.0)
    out, back = device.to_host_bytes_per_s, device.to_device_bytes_per_s
    if rules.offload and out is not None and back is not None:
        lanes = (out, back, device.transfer_latency_s)
    pinned = -1 if device.pinned_bytes is None else device.pinned_bytes
    # 0 is a hole that is not moved.
    away = [1 + start.moved[hole] if hole in start.moved else 0 for hole in range(holes.count)]
    choice, away = compiled(holes).anneal(
        start.choice, away, rules.budget_bytes, late_or_units(deadline), (*lanes, pinned),
        (rules.warm, COLD), tries=rules.tries, seed=rules.seed, recompute=rules.recompute,
        wait=rules.wait,
    )  # fmt: skip
    return carried(holes, choice, {hole: it - 1 for hole, it in enumerate(away) if it})
