"""What the seam of Horovod's torch stands on: who calls, what is on its way, what is kept.

May import torch, Horovod's torch and all of the core; of `torch` only `outcomes.py`.
"""
