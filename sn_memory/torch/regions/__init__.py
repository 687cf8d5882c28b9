"""Regions: parts of a model that can be traced, planned together within one budget."""
