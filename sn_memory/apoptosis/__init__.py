"""Neurons merged while a network trains: what may go, what takes its place, what that changes.

Pure NumPy. The rims (`.torch`, `.tensorflow`) ask a framework for statistics, obey what is decided
here, and shrink weights, norms and the optimizer's state. Siegel, Daily, Vishnu 2016
("Adaptive neuron apoptosis", arXiv 1610.00790) merge neurons of nearly the same direction; here the
change of what the next layers put out is measured, and `tolerance` is its limit.
"""

from .merge import Choice, Reader, choose, fold
from .pace import Schedule

__all__ = ["Choice", "Reader", "Schedule", "choose", "fold"]
