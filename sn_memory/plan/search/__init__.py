"""The planner of our own: choices that are found, mended and improved.

It imports what stands below `plan/api.py`: `base`, `graph`, `cost`, and of `plan` the records.
"""
