"""Parameters and optimizer state on the host: where they lie, what moves them, who updates them."""
