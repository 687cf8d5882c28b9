"""Planning within a budget: the plan as data, the search for it, and the entry points."""
