"""Planners and codecs that the packages do not contain, for comparison."""
