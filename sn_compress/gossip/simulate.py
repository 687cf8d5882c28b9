"""Simulated training on up to 1,024 ranks: how far ranks drift apart, and what it costs.

Every rank minimizes the same quadratic, half the sum of eigenvalue * x**2 with eigenvalues from
1e-3 to 1, with independent gradient noise. All schemes get the same noise, so they differ only in
how ranks communicate:

    all-reduce   every rank steps along the mean gradient
    alone        no communication
    gradients    a rank averages its gradient with its partner's    (as in torchdistx)
    weights      step, then average the weights with the partner's
    overlapped   (own + partner's)/2 - step, both from before the step: may be sent during it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import CompressError
from ..text_table import text_table
from .topology import Topology, consensus_distance

SCHEMES = ("all-reduce", "alone", "gradients", "weights", "overlapped")
RECORDED = 200  # points on a curve
SETTLED = 0.25  # last fraction of a run, over which results are averaged
MOST_RANKS = 1024
_HEAD = ("scheme", "distance", "growth", "loss of the mean", "loss of a worker")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The result for one scheme; each attribute is a series over `steps`.

    Attributes
    ----------
    distance : consensus distance, the root mean square over the ranks
    mean_loss : loss of the mean model
    worker_loss : loss of a worker, averaged over the ranks
    """

    scheme: str
    steps: tuple[int, ...]
    distance: tuple[float, ...]
    mean_loss: tuple[float, ...]
    worker_loss: tuple[float, ...]

    def settled(self, what: str) -> float:
        """Return the mean of "distance", "mean_loss" or "worker_loss" over the last quarter."""
        values = getattr(self, what)
        return float(np.mean(values[-max(1, int(SETTLED * len(values))) :]))

    def growth(self) -> float:
        """Return the consensus distance of the last quarter over that of the third; 1: bounded."""
        quarter = len(self.distance) // 4
        before = np.mean(self.distance[-2 * quarter : -quarter])
        return float(np.mean(self.distance[-quarter:]) / before) if before else 1.0


def simulate(
    topology: Topology,
    *,
    steps: int = 2000,
    n: int = 200,
    rate: float = 0.1,
    noise: float = 1.0,
    momentum: float = 0.0,
    seed: int = 0,
    progress: Callable[[int], object] = lambda step: None,
) -> list[Curve]:
    """Train with all SCHEMES; return a curve for each.

    Parameters
    ----------
    steps : training steps, 8 or more
    n : number of model parameters
    rate, momentum : learning rate and momentum of SGD, the same for all schemes
    noise : standard deviation of each gradient entry
    progress : called after each step, with the number of steps done
    """
    ranks = topology.ranks
    if ranks > MOST_RANKS or steps < 8 or n < 1:
        raise CompressError(
            f"{ranks} ranks, {steps} steps, n={n}; expected up to {MOST_RANKS} ranks, 8 steps or "
            "more and n of 1 or more"
        )
    for name, value in (("rate", rate), ("noise", noise), ("momentum", momentum)):
        if not 0 <= value < math.inf:
            raise CompressError(f"{name}: got {value}, expected a number of 0 or more")
    generator = np.random.default_rng(seed)
    curvature = np.geomspace(1e-3, 1, n)
    start = generator.normal(size=n)
    replicas = {scheme: np.tile(start, (ranks, 1)) for scheme in SCHEMES}
    speeds = {scheme: np.zeros((ranks, n)) for scheme in SCHEMES}
    recorded = np.unique(np.linspace(1, steps, min(steps, RECORDED)).astype(int))
    seen: dict[str, list[tuple[float, float, float]]] = {scheme: [] for scheme in SCHEMES}
    record_at = set(recorded.tolist())
    for step in range(steps):
        meeting = topology.at(step)
        drawn = noise * generator.standard_normal((ranks, n))
        for scheme, values in replicas.items():
            gradients = curvature * values + drawn
            if scheme == "all-reduce":
                gradients[:] = gradients.mean(0)
            elif scheme == "gradients":
                gradients = meeting.mix(gradients)
            speed = speeds[scheme]
            speed *= momentum
            speed += gradients
            if scheme == "overlapped":  # mixed before the step: the weights sent are older
                values = meeting.mix(values)
            values = values - rate * speed
            replicas[scheme] = meeting.mix(values) if scheme == "weights" else values
            if step + 1 in record_at:
                seen[scheme].append(_look(replicas[scheme], curvature))
        progress(step + 1)
    return [
        Curve(scheme, tuple(recorded.tolist()), *zip(*points, strict=True))
        for scheme, points in seen.items()
    ]


def _look(values: Array, curvature: Array) -> tuple[float, float, float]:
    """Return the consensus distance, the loss of the mean model and the mean loss of a worker."""
    mean_loss = 0.5 * float(curvature @ values.mean(0) ** 2)
    worker_loss = 0.5 * float((values**2 @ curvature).mean())
    return consensus_distance(values), mean_loss, worker_loss


def table(curves: list[Curve]) -> str:
    """Return the means over the last quarter of each curve, as a text table."""
    rows = []
    for curve in curves:
        distance, mean, worker = map(curve.settled, ("distance", "mean_loss", "worker_loss"))
        # With all-reduce the distance is rounding error, whose growth is meaningless.
        growth = f"{curve.growth():.2f}" if distance > 1e-9 else "-"
        rows.append([curve.scheme, f"{distance:.4f}", growth, f"{mean:.4f}", f"{worker:.4f}"])
    return text_table(_HEAD, rows)
