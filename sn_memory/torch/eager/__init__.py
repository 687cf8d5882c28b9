"""A plan carried out call by call: programs, lanes beside the ops, blocks on the host.

It imports `trace` and what is above it.
"""
