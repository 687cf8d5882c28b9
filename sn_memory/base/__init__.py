"""What everything else stands on: errors, sizes as people write them, the clock, JSON fields."""
