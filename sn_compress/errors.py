"""Exceptions and warnings.

    CompressError(ValueError)        a setting, tensor or call that cannot be carried out
      PayloadError                   bytes that are not a payload of this codec
    MissingExtra(ImportError)        an optional library is needed and absent
    SaturationWarning(UserWarning)   values beyond a fixed range were clipped to its ends
    UncalledWarning(UserWarning)     compression was requested, but nothing calls it

Every message has four parts: what failed, what it got, what was expected, what to do.
"""

from __future__ import annotations

from importlib.util import find_spec


class CompressError(ValueError):
    """A setting, tensor or call that cannot be carried out."""

    # TensorFlow's AutoGraph re-raises errors that have this constructor, with its own trace in the
    # message; for any other constructor it raises an error of a class of its own.
    __init__ = Exception.__init__


class PayloadError(CompressError):
    """Bytes that are not a payload of this codec (damaged, truncated, foreign)."""


class MissingExtra(ModuleNotFoundError):  # noqa: N818 - it is the extra that is missing
    """An optional library is needed and not installed; the message names the extra."""


def need(library: str, by: str) -> None:
    """Raise MissingExtra if a rim is imported without its framework or Horovod installed."""
    if find_spec(library) is None:
        do = f"pip install 'superneurons[{library}]'"
        if library == "horovod":
            do = "scripts/build_horovod.py of this project builds one that fits your frameworks"
        raise MissingExtra(f"{by} needs {library}, which is not installed: {do}")


class SaturationWarning(UserWarning):
    """Values beyond a fixed range were clipped to its ends."""


class UncalledWarning(UserWarning):
    """Compression was requested, but nothing calls it: gradients travel uncompressed."""
