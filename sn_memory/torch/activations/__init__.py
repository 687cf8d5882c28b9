"""compress_activations: what autograd saves for the backward pass, in few bits.

It imports `model` and the core, `activations` among it.
"""
