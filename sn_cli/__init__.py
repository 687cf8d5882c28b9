"""sn_cli: the command line of both packages, `sn compress ...` and `sn memory ...`.

It stands above sn_compress and sn_memory, and neither knows of it.
"""
