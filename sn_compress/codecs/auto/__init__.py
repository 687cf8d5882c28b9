"""The codec that tries others on the tensor itself.

May import `codecs/frequency`, `codecs/factors` and what these may.
"""
