"""Compression methods, one file each; all keep the contract of `sn_compress.codecs.base.Codec`."""
