"""A plan as a selective-checkpoint policy: what a block saves, for torch's own executor."""
