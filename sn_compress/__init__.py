"""sn_compress: gradient compression that cuts the bytes on the wire.

Public names are loaded on first use (PEP 562), so `import sn_compress` takes a few milliseconds
and loads neither NumPy nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .codecs.base import Codec as Codec
    from .codecs.base import Payload as Payload
    from .codecs.fft import FFTCodec as FFTCodec
    from .codecs.registry import backends as backends
    from .codecs.registry import codec as codec
    from .codecs.registry import presets as presets
    from .compression import AutoCompression as AutoCompression
    from .compression import CastCompression as CastCompression
    from .compression import FFTCompression as FFTCompression
    from .compression import LowRankCompression as LowRankCompression
    from .engine.feedback import ErrorFeedback as ErrorFeedback
    from .errors import CompressError as CompressError
    from .errors import MissingExtra as MissingExtra
    from .errors import PayloadError as PayloadError
    from .errors import SaturationWarning as SaturationWarning
    from .errors import UncalledWarning as UncalledWarning
    from .ops.quantize import RangeFloat as RangeFloat
    from .prediction.cost import Link as Link
    from .prediction.predict import predict as predict
    from .prediction.rates import measure_rates as measure_rates

__version__ = "0.1.0"

_HOME = {
    "AutoCompression": ".compression",
    "CastCompression": ".compression",
    "Codec": ".codecs.base",
    "CompressError": ".errors",
    "ErrorFeedback": ".engine.feedback",
    "FFTCodec": ".codecs.fft",
    "FFTCompression": ".compression",
    "Link": ".prediction.cost",
    "LowRankCompression": ".compression",
    "MissingExtra": ".errors",
    "Payload": ".codecs.base",
    "PayloadError": ".errors",
    "RangeFloat": ".ops.quantize",
    "SaturationWarning": ".errors",
    "UncalledWarning": ".errors",
    "backends": ".codecs.registry",
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
