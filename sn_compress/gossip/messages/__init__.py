"""What goes to a partner in a step, and how its own is mixed in: one rim per framework."""
