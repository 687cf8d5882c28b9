"""The graph of a training step: ops, storages, bytes and seconds, as records and in arrays."""
