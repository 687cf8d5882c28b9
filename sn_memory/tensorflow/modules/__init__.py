"""Layers that run again, for models that cannot be traced: chosen by measurement."""
