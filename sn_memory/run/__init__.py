"""What both rims share: choices that are measured, estimates, agreement of ranks.

It imports all rooms above it in the tree, and no framework.
"""
