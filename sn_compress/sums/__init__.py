"""What an all-reduce may add up: buckets of parts, their rounds, what of each tensor travels.

May import `sums/parts`, `codecs/base.py`, `ops`, `devices` and `base`.
"""
