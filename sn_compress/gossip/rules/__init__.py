"""When a rank steps, sends and mixes: one rim per framework."""
