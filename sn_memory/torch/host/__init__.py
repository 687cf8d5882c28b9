"""Host memory for a device: its buffers, and all copies to them and back."""
