"""Methods of the literature that the packages do not contain: what benchmarks compare with."""
