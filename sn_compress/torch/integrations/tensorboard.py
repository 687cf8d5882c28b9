"""report() for TensorBoard, and for any other log of named numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "compression/"


def named(report: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a report under the names used in logs.

    >>> named({"ratio": 98.5, "steps": 10})
    {'compression/ratio': 98.5, 'compression/steps': 10.0}
    """
    return {f"{_PREFIX}{name}": float(value) for name, value in report.items()}


def log_report(writer: Any, report: Mapping[str, float], step: int) -> None:
    """Write a report as scalars: bytes and ratio, relative error, tensors by method.

    Parameters
    ----------
    writer : a torch.utils.tensorboard SummaryWriter, or any object with its add_scalar
    report : from CompressionState.report() or e.g. `FFTCompression.report(optimizer)`
    step : training step
    """
    for name, value in named(report).items():
        writer.add_scalar(name, value, step)
