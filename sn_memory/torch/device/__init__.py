"""The device a model is on: its memory beside the host's, its streams, its random numbers."""
