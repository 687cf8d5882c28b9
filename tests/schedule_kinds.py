"""Every kind of schedule that theta may have, and what theta should then be: for all seams."""

from __future__ import annotations

import copy
import math

from sn_compress import FFTCodec
from sn_compress.schedule import Annealed, Constant, Diminishing, EnergyBudget, Warmup, learner


class Cosine:
    """A user's own: a function of the step, on no ladder, with a repr that shows an address."""

    def theta(self, step):
        return 0.5 + 0.45 * math.sin(step / 3) ** 2


class Thrifty:
    """A user's own that learns: it keeps half as much again whenever more than a tenth was lost."""

    def __init__(self):
        self.keep = 0.02

    def theta(self, step):
        return 1 - self.keep

    def observe(self, energy, error):
        self.keep = min(0.9, self.keep * (1.5 if error > 0.1 * energy else 0.9))

    def state_dict(self):
        return {"keep": self.keep}

    def load_state_dict(self, state):
        self.keep = float(state["keep"])


KINDS = {
    "constant": Constant(0.9),
    "warm-up": Warmup(4, Constant(0.95)),
    "diminishing": Diminishing(0.99, rate=lambda step: 0.5**step),
    "annealed": Annealed(0.8, rate=lambda step: 0.5**step, steps=8),
    "budget": EnergyBudget(lost=0.2, start=0.95, every=2),
    "warm-up, then budget": Warmup(3, EnergyBudget(lost=0.2, start=0.95, every=2)),
    "cosine": Cosine(),
    "thrifty": Thrifty(),
}
LEARNING = ("budget", "warm-up, then budget", "thrifty")


class Watch:
    """What theta each step of this rank had, and what its payloads lost, from the codec itself."""

    def __init__(self):
        self.steps = []  # (theta, energy, error)
        self._seen = []
        encode = FFTCodec.encode_into  # `encode` is that, too

        def watched(codec, buffer, values, **options):
            payload = encode(codec, buffer, values, **options)
            self.see(codec.theta, payload.energy, payload.error)
            return payload

        FFTCodec.encode_into = watched

    def see(self, theta, energy, error):
        """Take note of what was encoded."""
        self._seen.append((theta, energy, error))

    def end_step(self):
        """All gradients of a step had the same theta."""
        thetas, energies, errors = zip(*self._seen, strict=True)
        assert len(set(thetas)) == 1, thetas
        self.steps.append((thetas[0], math.fsum(energies), math.fsum(errors)))
        self._seen = []

    def taken(self):
        """The steps so far, and begin anew."""
        steps, self.steps = self.steps, []
        return steps


def check(kind, every):
    """Whether all ranks had the theta that the kind is for, by `Watch.steps` of each."""
    thetas = [[theta for theta, _, _ in steps] for steps in every]
    assert all(own == thetas[0] for own in thetas), f"{kind}: ranks differ: {thetas}"
    own, expected = copy.deepcopy(KINDS[kind]), []
    for step, parts in enumerate(zip(*every, strict=True)):
        expected.append(own.theta(step))
        if last := learner(own, step):
            last.observe(math.fsum(p[1] for p in parts), math.fsum(p[2] for p in parts))
    assert thetas[0] == expected, f"{kind}: {thetas[0]}, expected {expected}"
    assert kind == "constant" or len(set(expected)) > 3, f"{kind} does not move: {expected}"
