"""Functions over arrays: the oracles of the faster back ends in `csrc/compress`.

They import arrays, the extension and errors alone. A file of csrc has its twin's name.
"""
