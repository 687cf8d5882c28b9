"""The strongest coefficients of a block as one record of bits, and back.

May import `ops/spectra`, `ops/words`, `devices` and `base`.
"""
