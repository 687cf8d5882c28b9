"""Gradients between `compress` and `decompress`: what Horovod is given as the context."""
