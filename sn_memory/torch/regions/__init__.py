"""Parts of a model that trace whole, planned together within one budget.

It imports the eager program, `trace`, `model` and the core.
"""
