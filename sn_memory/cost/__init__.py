"""What an action costs: reruns, copies to the host, workspaces, and tables of measured times."""
