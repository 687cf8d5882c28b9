"""Digests of tensors where they are; a file for each framework that needs one."""
