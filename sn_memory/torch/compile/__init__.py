"""A plan carried out by torch.compile: the joint graph, cut where the plan says.

It imports `trace` and what is above it.
"""
