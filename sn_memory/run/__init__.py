"""What both rims share: choices that are measured, estimates, what an allocator reserves.

It imports all rooms above it in the tree, and no framework.
"""
