"""Reports on plans: tables, a figure, an HTML page."""
