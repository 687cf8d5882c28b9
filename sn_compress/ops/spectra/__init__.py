"""Orthonormal transforms of blocks and of long vectors, on a host and over any array library.

May import `devices` and `base`.
"""
