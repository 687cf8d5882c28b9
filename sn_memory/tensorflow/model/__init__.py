"""What a model is to a plan: its settings and inputs, and what the allocator was asked for.

It imports `errors` of this rim and the core.
"""
