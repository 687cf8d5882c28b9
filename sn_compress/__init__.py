"""sn_compress: gradients in far fewer bytes on the wire.

The public names are loaded at first use (PEP 562), so `import sn_compress` costs a few
milliseconds and loads neither NumPy nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._backends import backends as backends
    from .base.errors import CompressError as CompressError
    from .base.errors import MissingExtra as MissingExtra
    from .base.errors import PayloadError as PayloadError
    from .base.errors import SaturationWarning as SaturationWarning
    from .base.errors import UncalledWarning as UncalledWarning
    from .codecs.base import Codec as Codec
    from .codecs.base import Payload as Payload
    from .codecs.frequency.fft import FFTCodec as FFTCodec
    from .codecs.registry import codec as codec
    from .codecs.registry import presets as presets
    from .compression import AutoCompression as AutoCompression
    from .compression import FFTCompression as FFTCompression
    from .compression import LowRankCompression as LowRankCompression
    from .engine.feedback import ErrorFeedback as ErrorFeedback
    from .ops.records.quantize import RangeFloat as RangeFloat
    from .prediction.cost import Link as Link
    from .prediction.predict import predict as predict
    from .prediction.rates import measure_rates as measure_rates

__version__ = "0.1.0"

_HOME = {
    "AutoCompression": ".compression",
    "Codec": ".codecs.base",
    "CompressError": ".base.errors",
    "ErrorFeedback": ".engine.feedback",
    "FFTCodec": ".codecs.frequency.fft",
    "FFTCompression": ".compression",
    "Link": ".prediction.cost",
    "LowRankCompression": ".compression",
    "MissingExtra": ".base.errors",
    "Payload": ".codecs.base",
    "PayloadError": ".base.errors",
    "RangeFloat": ".ops.records.quantize",
    "SaturationWarning": ".base.errors",
    "UncalledWarning": ".base.errors",
    "backends": "._backends",
    "codec": ".codecs.registry",
    "measure_rates": ".prediction.rates",
    "predict": ".prediction.predict",
    "presets": ".codecs.registry",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
