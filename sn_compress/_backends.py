"""Which back end runs, and why: a slower one is never taken silently."""

from __future__ import annotations

from .codecs.registry import CODECS
from .devices import _cuda, _native


def backends() -> dict[str, str]:
    """Name of the device -> the back end that serves it and the reason.

    >>> sorted(backends())
    ['cpu', 'cuda']
    """
    kernels = ", ".join(sorted(name for name, entry in CODECS.items() if entry.kernels))
    others = ", ".join(sorted(name for name, entry in CODECS.items() if not entry.kernels))
    return {
        "cpu": _native.load()[1],
        "cuda": f"{_cuda.found()}. Kernels: {kernels}. Copied to the host: {others}",
    }
