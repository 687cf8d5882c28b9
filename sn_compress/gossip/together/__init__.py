"""Whether ranks agree, and how far they are apart: one rim per framework."""
