"""Steps under torch.compile: the setting of torch's own memory budget that measures fastest.

It imports `trace` and what is above it.
"""
