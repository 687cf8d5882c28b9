"""A step as nodes of a graph: payloads and sums without Python while it runs.

May import TensorFlow, Horovod and all of the core; nothing else of `tensorflow`.
"""
