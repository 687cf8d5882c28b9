"""What the pages' figures are measured by: `python -m benchmarks --list`."""
