"""Functions over arrays: the reference implementations of the faster code in `csrc/compress`.

May import only arrays, the extension and errors. A file in csrc has the name of its counterpart.
"""
