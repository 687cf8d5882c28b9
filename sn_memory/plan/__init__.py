"""What to do within a budget: the plan as data, the search for it, and the ways into it."""
