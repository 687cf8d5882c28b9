"""What an all-reduce may add up: what of each tensor travels, its rounds, what is left for later.

May import `ops`, what that stands on, and `codecs.base`.
"""
