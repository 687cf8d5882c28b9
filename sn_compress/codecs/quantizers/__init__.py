"""All values in few bits each: 1-bit, QSGD, TernGrad, an error bound, a cast.

May import the files of `codecs`, `ops`, `devices` and `base`.
"""
