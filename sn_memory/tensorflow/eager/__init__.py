"""A plan carried out op by op, inside the graph that TensorFlow traces.

It imports `trace` and what is above it.
"""
