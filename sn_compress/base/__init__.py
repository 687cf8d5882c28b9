"""What all else stands on: errors, names, states as saved, and what ranks have to say alike.

May import nothing of ours. NumPy only, and no array of a framework.
"""
