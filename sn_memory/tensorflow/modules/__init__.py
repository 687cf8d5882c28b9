"""Recomputation of layers chosen by measurement, for models that cannot be traced."""
