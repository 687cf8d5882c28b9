"""How messages reach a partner: one rim per framework, over Horovod or torch.distributed."""
