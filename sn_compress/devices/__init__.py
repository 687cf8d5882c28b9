"""Where a tensor lives and what computes there: array libraries, CUDA through CuPy, the extension.

May import `base`. The one place that asks which library and device a tensor has.
"""
