"""What both rims share: choices that are measured, estimates, what an allocator reserves."""
