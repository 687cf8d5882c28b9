"""Tensors as matrices: products with few directions, orthonormal rows, waves of small kernels.

May import `ops/words`, `devices` and `base`.
"""
