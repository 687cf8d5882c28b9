"""report() for TensorBoard, and for any other log of named numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PREFIX = "compression/"


def named(report: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a report under the names that logs have for them.

    >>> named({"ratio": 98.5, "steps": 10})
    {'compression/ratio': 98.5, 'compression/steps': 10.0}
    """
    return {f"{_PREFIX}{name}": float(value) for name, value in report.items()}


def log_report(writer: Any, report: Mapping[str, float], step: int) -> None:
    """Write a report as scalars: bytes and ratio, relative error, tensors by the way they travel.

    Parameters
    ----------
    writer : a SummaryWriter of torch.utils.tensorboard, or what has its add_scalar
    report : of a CompressionState, or of `FFTCompression.report(optimizer)`
    step : of training
    """
    for name, value in named(report).items():
        writer.add_scalar(name, value, step)
