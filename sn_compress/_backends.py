"""Which back end runs, and why: a slower one is never taken silently."""

from __future__ import annotations

from . import _cuda, _native


def backends() -> dict[str, str]:
    """Name of the device -> the back end that serves it and the reason.

    >>> sorted(backends())
    ['cpu', 'cuda']
    """
    return {
        "cpu": _native.load()[1],
        "cuda": _cuda.found(),
    }
