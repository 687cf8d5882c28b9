"""What a layer keeps in fewer bytes, and who packs it on the host.

It imports the core, `activations` among it.
"""
