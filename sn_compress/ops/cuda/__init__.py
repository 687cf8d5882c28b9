"""Launches of the CUDA kernels: sizes, tables, arguments. Runs without a device.

May import `ops/records`, `ops/spectra`, `ops/words`, `devices` and `base`.
"""
