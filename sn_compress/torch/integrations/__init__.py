"""One-line integrations of the DDP hook and its memory with third-party training loops.

Loaded on first use (PEP 562), each with its library: transformers, lightning, accelerate.
"""

from __future__ import annotations

from importlib import import_module

from ...errors import MissingExtra

_HOME = {
    "LightningCompression": ".lightning",
    "TrainerCompression": ".hugging_face",
    "compress_accelerated": ".accelerate",
    "log_report": ".tensorboard",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name], __name__), name)
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            f"{name} needs {missing.name}, which is not installed. Do: pip install {missing.name}"
        ) from missing
    globals()[name] = value
    return value
