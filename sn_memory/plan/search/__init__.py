"""Our own planner: find choices, repair them to fit the budget, and improve them."""
