"""Codecs by name, presets that match other authors' implementations, and saved states.

A codec's module is imported when it is first requested.

A saved state names the class and the settings that define it. A codec with the same class and
settings resumes from it bit by bit; for another codec it is converted to a residual and back, and
everything else (momentum, factors, step counts) starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from .. import _cuda, _native
from ..errors import CompressError
from .base import MAX_ELEMENTS, Codec, Floats, saved_item


@dataclass(frozen=True)
class Preset:
    """Settings, and their source."""

    settings: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Entry:
    """A codec's module and class, settings fixed by its name, presets, and if kernels exist."""

    module: str
    cls: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    kernels: bool = False


GRACE = "sands-lab/grace fd3a7f4, grace_dl/torch"

CODECS: dict[str, Entry] = {
    "dct": Entry(".fft", "FFTCodec", {"transform": "dct"}, kernels=True),
    "hadamard": Entry(".fft", "FFTCodec", {"transform": "hadamard"}, kernels=True),
    "axes": Entry(".fft", "FFTCodec", {"transform": "axes"}, kernels=True),
    "fft": Entry(
        ".fft",
        "FFTCodec",
        kernels=True,
        presets={
            "paper": Preset(
                {"block": None, "positions": "bitmap", "half": True},
                "arXiv 1811.08596: one transform over the vector, fp16 in, bitmap",
            )
        },
    ),
    "topk": Entry(
        ".topk",
        "TopKCodec",
        presets={
            "grace": Preset(
                {"theta": 0.7, "indices": "int64"},
                f"{GRACE}/compressor/topk.py; compress_ratio 0.3 is helper.py's default",
            ),
            "compact": Preset(
                {
                    "theta": 1 - 64 / 4096,
                    "chunk": 4096,
                    "indices": "packed",
                    "values": "2bit",
                    "decay": 0.95,
                },
                "SparseLoCo (arXiv 2508.15706) as in one-covenant/templar 142666f, hparams.json: "
                "64 of 4096, 12-bit indices, four bins over 6 deviations, momentum_decay 0.95",
            ),
        },
    ),
    "qsgd": Entry(
        ".qsgd",
        "QSGDCodec",
        presets={
            "grace": Preset(
                {"levels": 256, "bucket": None, "packing": "bytes"},
                f"{GRACE}/compressor/qsgd.py; quantum_num 256 is helper.py's default, sent as "
                "16 bits",
            ),
            "paper": Preset(
                {"levels": 7, "bucket": 512, "norm": "max"},
                "Alistarh et al. 2017, 4 bits in buckets of 512 scaled by the maximum, as "
                "remembered of its experiments; their Elias coding is left out",
            ),
        },
    ),
    "terngrad": Entry(
        ".terngrad",
        "TernGradCodec",
        presets={
            "grace": Preset(
                {"spread": "std", "packing": "bytes"}, f"{GRACE}/compressor/terngrad.py"
            ),
            "paper": Preset(
                {"spread": "std", "packing": "bits"},
                "Wen et al. 2017: 2 bits, one scale per tensor, clipped at 2.5 deviations",
            ),
        },
    ),
    "onebit": Entry(
        ".onebit",
        "OneBitCodec",
        presets={
            "grace": Preset({"bucket": None, "packing": "bytes"}, f"{GRACE}/compressor/onebit.py"),
            "ef-sign": Preset(
                {"variant": "ef-sign", "bucket": None},
                "Karimireddy et al. 2019: sign and mean magnitude of the tensor",
            ),
        },
    ),
    "bounded": Entry(
        ".bounded",
        "BoundedCodec",
        presets={
            "actnn": Preset(
                {"bound": float("inf"), "bits": 2, "group": 256},
                "Chen et al., ActNN, ICML 2021: 2 bits, groups of 256, rounded at random",
            ),
        },
    ),
    "fp16": Entry(".cast", "CastCodec", {"dtype": "fp16"}),
    "bf16": Entry(".cast", "CastCodec", {"dtype": "bf16"}),
    "fp8": Entry(".cast", "CastCodec", {"dtype": "fp8"}),
}
"""Name -> Entry; a new codec takes one file and one line here."""


def codec(name: str, *, preset: str | None = None, **settings: Any) -> Codec:
    """Create the codec with this name.

    Parameters
    ----------
    name : one of `sorted(CODECS)`
    preset : one of `presets(name)`; `settings` take precedence
    settings : of the codec's class

    Examples
    --------
    >>> codec("qsgd", levels=1, bucket=64)
    QSGDCodec(levels=1, bucket=64, norm='l2', packing='bits', seed=0)
    >>> codec("topk", preset="grace", theta=0.99).indices
    'int64'
    """
    return make(CODECS, name, preset, settings)


def make(
    table: Mapping[str, Entry], name: str, preset: str | None, settings: Mapping[str, Any]
) -> Codec:
    """Return the codec called `name` in a table; see `codec`."""
    entry = find(table, name)
    chosen = dict(entry.settings)
    if preset is not None:
        if preset not in entry.presets:
            known = ", ".join(sorted(entry.presets)) or "none"
            raise CompressError(f"codec {name!r} has no preset {preset!r}; it has: {known}")
        chosen |= entry.presets[preset].settings
    # "dct" with transform="fft" would contradict its name.
    for key in settings.keys() & entry.settings.keys():
        raise CompressError(f"codec {name!r} fixes {key}={entry.settings[key]!r}; leave it out")
    cls = getattr(import_module(entry.module, __package__), entry.cls)
    try:
        codec: Codec = cls(**(chosen | dict(settings)))
    except TypeError as wrong:  # a setting that the class does not have
        legal = ", ".join(cls.__init__.__kwdefaults__)
        raise CompressError(f"codec {name!r}: {wrong}. Its settings are: {legal}") from wrong
    return codec


def by_class(name: str, settings: Mapping[str, Any]) -> Codec:
    """Create a codec by the name of its class, as in saved states.

    >>> by_class("TopKCodec", {"theta": 0.9}).theta
    0.9
    """
    for entry in CODECS.values():
        if entry.cls == name:
            codec: Codec = getattr(import_module(entry.module, __package__), name)(**settings)
            return codec
    known = ", ".join(sorted({entry.cls for entry in CODECS.values()}))
    raise CompressError(f"no codec is of class {name!r}; known: {known}")


def presets(name: str) -> dict[str, Preset]:
    """Return the presets of a codec by name, each with its settings and their source.

    >>> sorted(presets("qsgd"))
    ['grace', 'paper']
    """
    return dict(find(CODECS, name).presets)


def find(table: Mapping[str, Entry], name: str) -> Entry:
    """Return the entry with this name; otherwise CompressError, with the known names."""
    if name not in table:
        raise CompressError(f"no codec is called {name!r}; known: {', '.join(sorted(table))}")
    return table[name]


def save(codec: Codec, state: Any, n: int) -> dict[str, Any]:
    """Return a state of n elements as arrays, numbers and strings."""
    return {
        "n": n,
        "codec": type(codec).__name__,
        "basis": codec.basis,
        "state": codec.dump_state(state, n),
    }


def load(codec: Codec, entry: dict[str, Any]) -> Any:
    """Return the state for this codec; CompressError if it is corrupt or cannot be converted.

    None if it contains nothing this codec can use.
    """
    n = elements(entry)
    same_class = saved_item(entry, "codec") == type(codec).__name__
    if same_class and _plain(saved_item(entry, "basis")) == _plain(codec.basis):
        return codec.load_state(saved_item(entry, "state"), n)
    # Another codec, or another basis: convert through a residual.
    values = load_values(entry)
    return None if values is None else codec.values_to_state(values)


def load_values(entry: dict[str, Any]) -> Floats | None:
    """Return a saved state's residual, [n] float32; None for codecs without memory."""
    n, basis = elements(entry), saved_item(entry, "basis")
    try:
        # Files turn the tuples `shape` and `axes` into lists.
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in basis.items()}
        saved = by_class(saved_item(entry, "codec"), settings)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CompressError(
            f"saved with settings {basis!r}, which no codec accepts: {error}"
        ) from error
    state = saved.load_state(saved_item(entry, "state"), n)
    if not saved.remembers:
        return None
    return np.asarray(saved.state_to_values(state, n), np.float32)


def elements(entry: dict[str, Any]) -> int:
    """Return the number of elements of a saved state."""
    n = saved_item(entry, "n")
    # It comes from a file: `True` counts as 1 in Python, and 2**60 would be allocated.
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_ELEMENTS:
        raise CompressError(f"has {n!r} elements; expected 0 to {MAX_ELEMENTS}")
    return n


def _plain(basis: Any) -> Any:
    """Convert tuples in settings to lists, as files do."""
    if isinstance(basis, dict):
        return {key: _plain(value) for key, value in basis.items()}
    return [_plain(item) for item in basis] if isinstance(basis, (list, tuple)) else basis


def map_tree(kind: type, change: Callable[[Any], Any], node: Any) -> Any:
    """Apply `change` to every value of a given type in nested dicts and lists."""
    # First, so that kind=dict is possible: results of `change` are not traversed.
    if isinstance(node, kind):
        return change(node)
    if isinstance(node, dict):
        return {key: map_tree(kind, change, value) for key, value in node.items()}
    return [map_tree(kind, change, item) for item in node] if isinstance(node, list) else node


def backends() -> dict[str, str]:
    """Return the back end for each kind of device, and the reason.

    >>> sorted(backends())
    ['cpu', 'cuda']
    """
    kernels = ", ".join(sorted(name for name, entry in CODECS.items() if entry.kernels))
    plain = ", ".join(sorted(name for name, entry in CODECS.items() if not entry.kernels))
    return {
        "cpu": _native.load()[1],
        "cuda": f"{_cuda.backend()}. Kernels: {kernels}. Copied to the host: {plain}",
    }
