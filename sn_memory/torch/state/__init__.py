"""Parameters and optimizer state in host memory: placement, copies and updates."""
