"""Low rank: two thin factors of one rank's gradient.

May import `codecs/frequency`, which takes what low rank leaves over, and what that may.
"""
