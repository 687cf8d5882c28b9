"""A vector to bytes and back: the contract, a file a method, all methods by name, saved states.

May import `ops` and what that stands on. `registry.py` knows methods by name. FFTCodec
is in `fft.py`, its array code in `batched.py`, its kernels in `_fft_cuda.py`.
"""
