"""Host memory used next to a device: its buffers, and all copies to and from them."""
