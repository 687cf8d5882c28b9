"""Conversion of a training step to a graph: capture, buffers, op times.

It imports `model` and the core.

`trace` of this package is also a function: write `from sn_memory.tensorflow.trace import capture`,
as `sn_memory.tensorflow.trace.capture` would look into the function.
"""
