"""Benchmarks behind the figures of the pages: `python -m benchmarks --list`."""
