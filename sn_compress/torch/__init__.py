"""Torch rims, one file per integration point: Horovod, DDP, FSDP2, gossip.

May import torch, horovod.torch and all of the core, but no other package; nothing imports it. This
file loads none of them, so that Horovod is needed only by those who import its modules.
"""

from ..errors import need

need("torch", "sn_compress.torch")
