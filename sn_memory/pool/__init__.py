"""Addresses in one arena for buffers whose lifetimes are known; `csv` reads and writes them."""
