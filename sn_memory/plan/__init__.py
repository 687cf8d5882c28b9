"""What to do within a budget: the plan as data, the search for it, and the ways into it.

It imports `base`, `graph` and `cost`; inside, `plan.py` stands lowest, then come `simulate.py` and
`walk.py`, and `search/` beside `policies/`.
"""
