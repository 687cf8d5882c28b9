"""Memory of the host beside a device: its buffers, and all copies to them and back."""
