"""How many bits positions take in Elias-Fano form, see pack.py: known from their number alone."""

from __future__ import annotations


def low_bits(k: int, f: int) -> int:
    """The l of Elias-Fano for k of f positions."""
    return (f // k).bit_length() - 1 if k else 0


def upper_bits(k: int, f: int) -> int:
    """Length of the Elias-Fano map for k of f positions."""
    return k + ((f - 1) >> low_bits(k, f)) + 1
