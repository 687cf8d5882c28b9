"""Methods to send a tensor through an all-reduce: low rank, rows, frequencies, or dense."""
