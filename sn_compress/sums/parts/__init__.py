"""The ways of a tensor in an all-reduce: low rank, rows, frequencies, or all of it.

May import `ops`, `devices` and `base`.
"""
