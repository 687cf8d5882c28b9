"""What an all-reduce may add up: parts of a bucket, over any array library. Imports ops and arrays."""
