"""What the named planners share: decisions followed through a graph, and the plan of it.

It imports `base`, `graph` and `plan/plan.py`.
"""
