"""Whether ranks agree at the start, and are still the same later; a file for each framework."""
