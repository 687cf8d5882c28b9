"""A plan as a selective-checkpoint policy: what of each block is saved, for torch's own executor.
"""
