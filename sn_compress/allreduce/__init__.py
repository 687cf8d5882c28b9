"""Compression that an all-reduce can sum: what to send of each tensor, its rounds, its memory.

May import `ops`, its dependencies, and `codecs.base`.
"""
