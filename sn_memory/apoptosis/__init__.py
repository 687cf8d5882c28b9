"""Neurons merged while a network trains: what may go, what takes its place, what that changes.

Pure NumPy. The rims (`.torch`, `.tensorflow`) ask a framework for statistics, obey what is decided
here, and shrink weights, norms and the optimizer's state. Siegel, Daily, Vishnu 2016
("Adaptive neuron apoptosis", arXiv 1610.00790) merge neurons of nearly the same direction; here the
change of what the next layers put out is measured, and `tolerance` is its limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.errors import at_first_use

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

__getattr__, __dir__ = at_first_use(__name__, _HOME)
