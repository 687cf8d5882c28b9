"""What an all-reduce may add up: parts of a bucket. Imports ops and arrays."""
