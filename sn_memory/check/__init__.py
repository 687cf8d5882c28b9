"""The judges: `replay` carries a plan out on paper, `packing` looks at addresses.

It imports `base`, `graph` and the records of `plan`: nothing of who makes what is judged.
"""
