"""A training step as a graph: captured, its buffers found, timed.

It imports `model` and the core.

`trace` of this package is also a function: write `from sn_memory.tensorflow.trace import capture`,
as `sn_memory.tensorflow.trace.capture` would look into the function.
"""
