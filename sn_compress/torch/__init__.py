"""The rims of torch: tensors in, tensors out, one file for one seam (Horovod, DDP, FSDP2, gossip).

May import torch, Horovod's torch and all of the core; no other room, and nothing imports it. This
file loads none of them: what needs Horovod is imported by who has it.
"""

from ..errors import need

need("torch", "sn_compress.torch")
