"""Packing buffers with known lifetimes into one arena; reading and writing them as CSV."""
