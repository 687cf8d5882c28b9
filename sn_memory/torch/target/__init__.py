"""The device that a plan is for, present or only named: memory, kernels, scratch."""
