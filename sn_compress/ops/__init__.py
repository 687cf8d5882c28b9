"""Functions over arrays: the oracles of the faster back ends in `csrc/compress`.

Rooms, each may import those before it: words, quantizers, linear, spectra, records, cuda. All may
import `base` and `devices`, and nothing else. A file of csrc has the name of its twin here.
"""
