"""The engine: runs compressed exchanges of one optimizer on one rank, and keeps its state.

Imports no framework, and not `prediction`: the object that measures and chooses is passed in.
"""
