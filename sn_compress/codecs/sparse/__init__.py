"""Some values and where they belong: top-k, DGC, DeMo.

May import the files of `codecs`, `ops`, `devices` and `base`.
"""
