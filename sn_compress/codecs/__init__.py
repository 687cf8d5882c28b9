"""Codecs, which convert a vector to bytes and back: the interface, one file per method, a registry.

May import `ops` and its dependencies. `registry.py` finds methods by name, and saves and loads
their states. FFTCodec is in `fft.py`, its array code in `batched.py`, its CUDA kernels in
`_fft_cuda.py`.
"""
