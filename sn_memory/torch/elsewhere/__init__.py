"""A step as a GPU would run it that is not here: its kernels, its workspaces, on paper.

It imports `base`, `cost`, `graph`, `torch`.
"""
