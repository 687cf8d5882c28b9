"""A table of simulated collisions: is there a heavy particle among the tracks? Not real data.

Each event has four objects with transverse momentum, pseudorapidity and azimuth, measured with an
error, ordered by momentum, and the missing momentum. In the signal two of them come from a particle
of mass 125 that is produced with a transverse momentum of its own; in the background those two have
the same spectrum of momenta, but come from a mass that falls exponentially. The other two are
radiation alike in both. Masses overlap after smearing, so no classifier is perfect.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MASS, SMEAR = 125.0, 0.08


def collisions(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [n, 14] float32, standardised, and labels [n] (1: signal)."""
    n, seed = {"train": (60_000, 1), "test": (30_000, 2)}[part]
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, n)
    mass = np.where(labels == 1, MASS, 60 + random.exponential(60.0, n))
    first, second = _decay(random, mass)
    objects = np.concatenate([np.stack([first, second], 1), _radiation(random, n)], axis=1)
    objects[:, :, 0] *= random.normal(1.0, SMEAR, objects.shape[:2]).clip(0.5, 1.5)
    order = objects[:, :, 0].argsort(axis=1)[:, ::-1]
    objects = np.take_along_axis(objects, order[:, :, None], axis=1)
    momentum, _, azimuth = np.moveaxis(objects, 2, 0)
    missing = -(momentum * np.exp(1j * azimuth)).sum(axis=1)
    features = np.column_stack(
        [np.log(momentum), objects[:, :, 1], azimuth / np.pi, missing.real / 50, missing.imag / 50]
    )
    features = np.clip(features, -6, 6)
    features[:, :4] -= 3.5
    return torch.from_numpy(features).float(), torch.from_numpy(labels).long()


def _decay(random: np.random.Generator, mass: Floats) -> tuple[Floats, Floats]:
    """Return both products of a decay into massless ones, [n, 3]: momentum, rapidity, azimuth."""
    n = len(mass)
    cosine, angle = random.uniform(-1, 1, n), random.uniform(-np.pi, np.pi, n)
    sine = np.sqrt(1 - cosine**2)
    way = np.stack([sine * np.cos(angle), sine * np.sin(angle), cosine], 1) * (mass / 2)[:, None]
    sideways, along = random.exponential(40.0, n), random.normal(0, 1.0, n)
    turn = random.uniform(-np.pi, np.pi, n)
    across = np.sqrt(mass**2 + sideways**2)
    pull = np.stack([sideways * np.cos(turn), sideways * np.sin(turn), across * np.sinh(along)], 1)
    energy = across * np.cosh(along)
    # Lorentz boost of (mass / 2, +-way) by pull / energy.
    shift = (way * pull).sum(1) / (mass * (energy + mass))
    prongs = []
    for sign in (1, -1):
        vector = sign * way + pull * (sign * shift + 0.5)[:, None]
        transverse = np.hypot(vector[:, 0], vector[:, 1])
        rapidity = np.arcsinh(vector[:, 2] / transverse)
        azimuth = np.arctan2(vector[:, 1], vector[:, 0])
        prongs.append(np.stack([transverse, rapidity, azimuth], 1))
    return prongs[0], prongs[1]


def _radiation(random: np.random.Generator, n: int) -> Floats:
    momentum = 20 + random.exponential(25.0, (n, 2))
    rapidity, azimuth = random.normal(0, 1.5, (n, 2)), random.uniform(-np.pi, np.pi, (n, 2))
    return np.stack([momentum, rapidity, azimuth], axis=2)
