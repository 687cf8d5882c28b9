"""Neurons merged while a network trains: what may go, what takes its place, what that changes.

Pure NumPy. The rims (`.torch`, `.tensorflow`) ask a framework for statistics, obey what is decided
here, and shrink weights, norms and the optimizer's state. Siegel, Daily, Vishnu 2016
("Adaptive neuron apoptosis", arXiv 1610.00790) merge neurons of nearly the same direction; here the
change of what the next layers put out is bounded, and `tolerance` is the knob.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bound import LIPSCHITZ as LIPSCHITZ
    from .bound import bound_from_weights as bound_from_weights
    from .bound import is_homogeneous as is_homogeneous
    from .merge import Choice as Choice
    from .merge import Merge as Merge
    from .merge import choose as choose
    from .merge import fold as fold
    from .reader import Reader as Reader
    from .schedule import Schedule as Schedule
    from .similarity import angles as angles
    from .similarity import correlations as correlations

_HOME = {
    "LIPSCHITZ": ".bound",
    "Choice": ".merge",
    "Merge": ".merge",
    "Reader": ".reader",
    "Schedule": ".schedule",
    "angles": ".similarity",
    "bound_from_weights": ".bound",
    "choose": ".merge",
    "correlations": ".similarity",
    "fold": ".merge",
    "is_homogeneous": ".bound",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
