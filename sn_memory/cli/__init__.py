"""The command line: graphs, plans and buffers as files.

It imports every room but the rims.
"""
