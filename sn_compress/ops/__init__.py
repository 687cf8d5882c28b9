"""Operations on arrays, one file each, in NumPy and SciPy: the oracles of the faster back ends."""
