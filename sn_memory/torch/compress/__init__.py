"""What autograd saves in fewer bytes: how a tensor is treated, and who sees it saved.

It imports `model` and the core, `activations` among it.
"""
