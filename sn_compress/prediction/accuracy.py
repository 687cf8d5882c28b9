"""What compressed training has lost where it lost most, and which ratio keeps within a limit.

Bytes and seconds follow from sizes; accuracy does not. So `predict` says beside its table what was
measured: short trainings of small nets on Fashion-MNIST, eight ranks, points of test accuracy below
plain training of the same seed, mean over seeds (docs/accuracy.md, `benchmarks/study.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..settings import CompressionName

LIMIT = 0.5  # points: what loses more is named


class Lost(NamedTuple):
    """Points lost by one compression on one net at a ratio of received bytes."""

    compression: CompressionName
    net: str
    ratio: float
    points: float
    seeds: int


MEASURED = (
    Lost("LowRankCompression", "convolutional net", 50, 0.24, 3),
    Lost("LowRankCompression", "convolutional net", 150, 0.51, 3),
    Lost("LowRankCompression", "transformer", 50, 0.27, 3),
    Lost("LowRankCompression", "transformer", 150, 0.76, 6),
    Lost("LowRankCompression", "residual net", 20, 0.78, 2),
    Lost("LowRankCompression", "residual net", 50, 1.36, 2),
    Lost("AutoCompression", "residual net", 20, 0.47, 2),
    Lost("AutoCompression", "residual net", 50, 1.07, 2),
    Lost("FFTCompression", "convolutional net", 20, 0.28, 3),
    Lost("FFTCompression", "convolutional net", 50, 0.51, 6),
    Lost("FFTCompression", "transformer", 20, 0.37, 3),
    Lost("FFTCompression", "transformer", 50, 0.76, 6),
    Lost("FFTCompression", "convolutional net", 150, 1.47, 3),
    Lost("FFTCompression", "transformer", 150, 1.10, 3),
    Lost("FFTCompression", "net of a million parameters", 50, 0.81, 2),
    Lost("FFTCompression", "residual net", 20, 0.21, 2),
    Lost("FFTCompression", "residual net", 50, 0.91, 2),
)
"""Of the nets in docs/accuracy.md; a test holds it to benchmarks/results."""


def worst(compression: CompressionName, ratio: float) -> Lost | None:
    """Where it lost most at the measured ratio next below `ratio`; None if none is as low."""
    at = [lost.ratio for lost in MEASURED if lost.compression == compression]
    near = max((each for each in at if each <= ratio), default=None)
    lost = [it for it in MEASURED if (it.compression, it.ratio) == (compression, near)]
    return max(lost, key=lambda it: it.points, default=None)


def within(compression: CompressionName, points: float = LIMIT) -> float | None:
    """The largest measured ratio at which no net measured lost more than so many points."""
    own = [lost for lost in MEASURED if lost.compression == compression]
    ratios = sorted({lost.ratio for lost in own})
    fine = [r for r in ratios if all(it.points <= points for it in own if it.ratio <= r)]
    return max(fine, default=None)


def advice(received: Mapping[CompressionName, float]) -> str:
    """What to know of accuracy, a line for each compression whose ratio was measured; or ""."""
    said = []
    for name, ratio in received.items():
        lost = worst(name, ratio)
        if lost is None:
            continue
        line = f"{name}: {lost.points:g} points at {lost.ratio:g}x, {lost.net}"
        found = within(name)
        if lost.points > LIMIT:
            # Its setting is theta, from which the ratio follows.
            at = "{:g}x" if name == "FFTCompression" else "ratio={:g}"
            line += f"; at most {LIMIT:g} at {at.format(found)}" if found else "; nothing below"
        said.append(line)
    if not said:
        return ""
    return "\n  ".join(["lost most in short trainings of small nets on 8 ranks:", *said])
