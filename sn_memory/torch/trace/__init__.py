"""A training step as a graph: recorded under fake tensors, rearranged, timed.

It imports `model`, `target` and the core.

`sn_memory.torch.trace` is also a function: write `from sn_memory.torch.trace import capture`, as
`sn_memory.torch.trace.capture` would be an attribute of the function.
"""
