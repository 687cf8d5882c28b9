"""The last product and its loss in chunks of rows, forward and backward pass together.

It imports `errors` and the core.
"""
