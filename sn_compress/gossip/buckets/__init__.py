"""Tensors put together to travel in one message: one rim per framework."""
