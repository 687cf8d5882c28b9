"""Cost models: reruns, copies to the host, workspaces, allocators, and measured op times."""
