"""What is known of the device a plan is for, present or named: memory, kernels, scratch."""
