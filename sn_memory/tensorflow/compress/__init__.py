"""What a layer keeps in fewer bytes, and who compresses it on the host.

It imports the core, `activations` among it.
"""
