"""compress_activations: inputs of layers in few bits.

It imports `modules` and the core, `activations` among it.
"""
