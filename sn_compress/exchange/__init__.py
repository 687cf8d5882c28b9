"""How the payloads of the ranks meet. Pure: the rims bring the bytes over."""
