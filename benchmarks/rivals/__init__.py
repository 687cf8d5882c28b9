"""Planners and codecs that the packages do not contain: what benchmarks compare with."""
