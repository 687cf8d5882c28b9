"""Where samples travel around the ring of ranks: a stage of each framework's own loader."""
