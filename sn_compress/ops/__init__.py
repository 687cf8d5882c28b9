"""Functions over arrays: the oracles of the faster back ends in `csrc/compress`.

They may import arrays, the extension, errors, and nothing else. A file of csrc has the name of its
twin here.
"""
