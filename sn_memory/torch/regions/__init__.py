"""Parts of a model that trace whole, planned together within one budget."""
