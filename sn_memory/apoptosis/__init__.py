"""Merging neurons during training: which ones to remove, what replaces them, and the change.

Pure NumPy. The framework rims (`.torch`, `.tensorflow`) gather statistics, carry out the decisions
made here, and shrink weights, norms and the optimizer's state. Siegel, Daily, Vishnu 2016
("Adaptive neuron apoptosis", arXiv 1610.00790) merge neurons of nearly the same direction; here the
change of the next layers' outputs is measured, and limited by `tolerance`.
"""

from .merge import Choice, Reader, choose, fold
from .pace import Schedule

__all__ = ["Choice", "Reader", "Schedule", "choose", "fold"]
