"""How a tensor travels in an all-reduce: low rank, rows, frequencies, or all of it."""
