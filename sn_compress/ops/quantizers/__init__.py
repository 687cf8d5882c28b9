"""Values as codes of few bits, by bucket, by group or by index: what the rivals are made of.

May import `ops/words`, `devices` and `base`.
"""
