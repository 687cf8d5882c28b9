"""A vector to bytes and back: the contract, all methods by name, saved states; a room a family.

May import `ops`, `devices` and `base`. The files here know a method by its name in `registry.py`.
A family may import these, and of the others: factors and auto import frequency, auto factors.
"""
