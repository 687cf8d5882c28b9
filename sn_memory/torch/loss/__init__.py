"""The last product and its loss in chunks of rows, forward and backward pass together.

It imports `model`, `errors` and the core.
"""
