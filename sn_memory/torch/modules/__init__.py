"""Recomputed modules, for models that cannot be traced: chosen by measurement."""
