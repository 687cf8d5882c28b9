"""What the seams of process groups stand on: their collectives, and how parameters lie.

May import torch and all of the core; no Horovod.
"""
