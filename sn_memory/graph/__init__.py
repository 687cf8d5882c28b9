"""What a training step is: ops, storages, bytes and seconds, as records and as numbers."""
