"""Layers that run again, for models that cannot be traced: chosen by measurement.

It imports `eager` and what is above it.
"""
