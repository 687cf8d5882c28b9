"""Modules that run again, for models that cannot be traced: chosen by measurement.

It imports `model` and the core.
"""
