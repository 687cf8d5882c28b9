"""Theta over the steps of one optimizer, the same on every rank.

A schedule that follows the error (EnergyBudget) has to see what all ranks lost. Two numbers per
tensor travel in the token that Horovod reduces anyway.
"""

from __future__ import annotations

import math
from collections import Counter

from ..codecs.fft import FFTCodec
from ..contract import Payload
from ..schedule import EnergyBudget
from ..settings import Settings


class ThetaInTime:
    """The codec of each tensor at its step."""

    def __init__(self, settings: Settings, threads: int) -> None:
        self._settings, self._threads = settings, threads
        self._schedule = settings.schedule()
        self._steps: Counter[str] = Counter()
        self._codecs: dict[float, FFTCodec] = {}
        self._told: dict[str, tuple[float, float]] = {}  # mean energy and error, by tensor

    def codec_for(self, name: str | None) -> FFTCodec:
        """The codec for the next gradient of a tensor; without a name, that of step 0."""
        step = 0 if name is None else self._steps[name]
        if name is not None:
            self._steps[name] += 1
            if name in self._told:
                self._close_step()
        theta = self._schedule.theta(step)
        if theta not in self._codecs:
            self._codecs[theta] = self._settings.codec_of(theta, self._threads)
        return self._codecs[theta]

    def tell(self, payload: Payload, *, wide: bool) -> list[float]:
        """What the token says: energy and error where the schedule asks; else one zero.

        A token of 16 bits could overflow: there each tensor's share that is lost is told, and
        all tensors weigh the same.
        """
        if not isinstance(self._schedule, EnergyBudget):
            return [0.0]
        energy, error = payload.energy or 0.0, payload.error or 0.0
        return [energy, error] if wide else [float(energy > 0), error / energy if energy else 0.0]

    def observe(self, name: str, energy: float, error: float = 0.0) -> None:
        """The token as reduced over the ranks."""
        if isinstance(self._schedule, EnergyBudget):
            self._told[name] = energy, error

    def _close_step(self) -> None:
        """Hand a finished step to the schedule; summed by name, as ranks finish in any order."""
        told, self._told = self._told, {}
        if isinstance(self._schedule, EnergyBudget):
            energy = math.fsum(energy for energy, _ in told.values())
            self._schedule.observe(energy, math.fsum(error for _, error in told.values()))
