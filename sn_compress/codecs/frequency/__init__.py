"""FFTCodec: the strongest coefficients of blocks, on a host, by kernels, as array code.

May import the files of `codecs`, `ops`, `devices` and `base`.
"""
