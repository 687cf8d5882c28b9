"""Numbers as bits and digits of words: their scales, their sums, their checksums.

May import `base` and `devices`.
"""
