"""Every kind of schedule that theta may have, and what theta should then be: for all seams."""

from __future__ import annotations

import math

from sn_compress import FFTCodec
from sn_compress.schedule import Annealed, Constant, Diminishing, Warmup


class Cosine:
    """A user's own: a function of the step, on no ladder, with a repr that shows an address."""

    def theta(self, step):
        return 0.5 + 0.45 * math.sin(step / 3) ** 2


KINDS = {
    "constant": Constant(0.9),
    "warm-up": Warmup(4, Constant(0.95)),
    "diminishing": Diminishing(0.99, rate=lambda step: 0.5**step),
    "annealed": Annealed(0.8, rate=lambda step: 0.5**step, steps=8),
    "cosine": Cosine(),
}


class Watch:
    """What theta each step of this rank had, from the codec itself."""

    def __init__(self):
        self.steps = []
        self._seen = []
        encode = FFTCodec.encode_into  # `encode` is that, too

        def watched(codec, buffer, values, **options):
            payload = encode(codec, buffer, values, **options)
            self.see(codec.theta)
            return payload

        FFTCodec.encode_into = watched

    def see(self, theta):
        """Take note of what was encoded with."""
        self._seen.append(theta)

    def end_step(self):
        """All gradients of a step had the same theta."""
        assert len(set(self._seen)) == 1, self._seen
        self.steps.append(self._seen[0])
        self._seen = []

    def taken(self):
        """The steps so far, and begin anew."""
        steps, self.steps = self.steps, []
        return steps


def check(kind, every):
    """Whether all ranks had the theta that the kind is for, by `Watch.steps` of each."""
    thetas = every[0]
    assert all(own == thetas for own in every), f"{kind}: ranks differ: {every}"
    expected = [KINDS[kind].theta(step) for step in range(len(thetas))]
    assert thetas == expected, f"{kind}: {thetas}, expected {expected}"
    assert kind == "constant" or len(set(expected)) > 3, f"{kind} does not move: {expected}"
