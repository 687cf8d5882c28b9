"""The planner of our own: choices that are found, mended and improved."""
