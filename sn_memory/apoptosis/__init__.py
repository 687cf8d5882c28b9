"""Neurons merged while a network trains: what may go, what takes its place, what that changes.

Pure NumPy. The rims (`.torch`, `.tensorflow`) ask a framework for statistics, obey what is decided
here, and shrink weights, norms and the optimizer's state. Siegel, Daily, Vishnu 2016
("Adaptive neuron apoptosis", arXiv 1610.00790) merge neurons of nearly the same direction; here the
change of what the next layers put out is measured, and `tolerance` is its limit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .merge import Choice as Choice
    from .merge import Merge as Merge
    from .merge import Reader as Reader
    from .merge import choose as choose
    from .merge import fold as fold
    from .pace import Schedule as Schedule

_HOME = {
    "Choice": ".merge",
    "Merge": ".merge",
    "Reader": ".merge",
    "Schedule": ".pace",
    "choose": ".merge",
    "fold": ".merge",
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
