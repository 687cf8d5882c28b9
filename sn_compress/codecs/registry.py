"""Codecs by name, and presets that make a rival what its authors ship.

A chain of `if name ==` imports everything and hides what there is. Here it is a table; a codec's
module is imported when its name is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..base.errors import CompressError
from .base import Codec


@dataclass(frozen=True)
class Preset:
    """Settings, and where they come from."""

    settings: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Entry:
    """Where a codec is, what its name alone sets, its presets, and whether CUDA kernels run it."""

    module: str
    cls: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    kernels: bool = False


_GRACE = "sands-lab/grace fd3a7f4, grace_dl/torch"

CODECS: dict[str, Entry] = {
    "auto": Entry(".auto.auto", "AutoCodec"),
    "dct": Entry(".frequency.fft", "FFTCodec", {"transform": "dct"}, kernels=True),
    "hadamard": Entry(".frequency.fft", "FFTCodec", {"transform": "hadamard"}, kernels=True),
    "axes": Entry(".frequency.fft", "FFTCodec", {"transform": "axes"}, kernels=True),
    "lowrank": Entry(".factors.lowrank", "LowRankCodec"),
    "fft": Entry(
        ".frequency.fft",
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
        ".sparse.topk",
        "TopKCodec",
        presets={
            "grace": Preset(
                {"theta": 0.7, "indices": "int64"},
                f"{_GRACE}/compressor/topk.py; compress_ratio 0.3 is helper.py's default",
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
        ".quantizers.qsgd",
        "QSGDCodec",
        presets={
            "grace": Preset(
                {"levels": 256, "bucket": None, "packing": "bytes"},
                f"{_GRACE}/compressor/qsgd.py; quantum_num 256 is helper.py's default, sent as "
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
        ".quantizers.terngrad",
        "TernGradCodec",
        presets={
            "grace": Preset(
                {"spread": "std", "packing": "bytes"}, f"{_GRACE}/compressor/terngrad.py"
            ),
            "paper": Preset(
                {"spread": "std", "packing": "bits"},
                "Wen et al. 2017: 2 bits, one scale per tensor, clipped at 2.5 deviations",
            ),
        },
    ),
    "dgc": Entry(
        ".sparse.dgc",
        "DGCCodec",
        presets={
            "grace": Preset(
                {"theta": 0.7, "momentum": 0.3, "indices": "int64"},
                f"{_GRACE}/compressor/dgc.py and memory/dgc.py; compress_ratio 0.3 and momentum "
                "0.3 are helper.py's defaults. Its clipping needs all ranks and is left out",
            ),
            "paper": Preset(
                {"theta": 0.999, "momentum": 0.9},
                "Lin et al. 2018: 0.1 %, momentum 0.9; set warmup to the steps of an epoch",
            ),
        },
    ),
    "onebit": Entry(
        ".quantizers.onebit",
        "OneBitCodec",
        presets={
            "grace": Preset({"bucket": None, "packing": "bytes"}, f"{_GRACE}/compressor/onebit.py"),
            "ef-sign": Preset(
                {"variant": "ef-sign", "bucket": None},
                "Karimireddy et al. 2019: sign and mean magnitude of the tensor",
            ),
        },
    ),
    "powersgd": Entry(
        ".factors.powersgd",
        "PowerSGDCodec",
        presets={
            "torch": Preset(
                {"rank": 1},
                "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook: rank 1, warm start, "
                "error feedback",
            )
        },
    ),
    "bounded": Entry(
        ".quantizers.bounded",
        "BoundedCodec",
        presets={
            "actnn": Preset(
                {"bound": float("inf"), "bits": 2, "group": 256},
                "Chen et al., ActNN, ICML 2021: 2 bits, groups of 256, rounded at random",
            ),
        },
    ),
    "fp16": Entry(".quantizers.cast", "CastCodec", {"dtype": "fp16"}),
    "bf16": Entry(".quantizers.cast", "CastCodec", {"dtype": "bf16"}),
    "demo": Entry(
        ".sparse.demo",
        "DeMoCodec",
        presets={
            "paper": Preset(
                {"topk": 32, "edge": 64, "decay": 0.999},
                "DeMo's published defaults (arXiv 2411.19870, bloc97/DeMo 0e48145)",
            )
        },
    ),
}
"""Name -> Entry; a new codec is one file and one line here."""


def codec(name: str, *, preset: str | None = None, **settings: Any) -> Codec:
    """The codec of this name.

    Parameters
    ----------
    name : one of `sorted(CODECS)`
    preset : a name of `presets(name)`; settings given beside it win
    settings : as the codec's class takes them

    Examples
    --------
    >>> codec("qsgd", levels=1, bucket=64)
    QSGDCodec(levels=1, bucket=64, norm='l2', packing='bits', seed=0)
    >>> codec("topk", preset="grace", theta=0.99).indices
    'int64'
    """
    entry = _entry(name)
    chosen = dict(entry.settings)
    if preset is not None:
        if preset not in entry.presets:
            known = ", ".join(sorted(entry.presets)) or "none"
            raise CompressError(f"codec {name!r} has no preset {preset!r}; it has: {known}")
        chosen |= entry.presets[preset].settings
    for key in settings.keys() & entry.settings.keys():
        raise CompressError(f"codec {name!r} fixes {key}={entry.settings[key]!r}; leave it out")
    make = getattr(import_module(entry.module, __package__), entry.cls)
    try:
        made: Codec = make(**chosen | settings)
    except TypeError as wrong:
        legal = ", ".join(make.__init__.__kwdefaults__)
        raise CompressError(f"codec {name!r}: {wrong}. Its settings are: {legal}") from wrong
    return made


def by_class(name: str, settings: Mapping[str, Any]) -> Codec:
    """The codec of a class of the registry, as saved states name it.

    >>> by_class("TopKCodec", {"theta": 0.9}).theta
    0.9
    """
    for entry in CODECS.values():
        if entry.cls == name:
            made: Codec = getattr(import_module(entry.module, __package__), name)(**settings)
            return made
    known = ", ".join(sorted({entry.cls for entry in CODECS.values()}))
    raise CompressError(f"no codec is of class {name!r}; known: {known}")


def presets(name: str) -> dict[str, Preset]:
    """Presets of a codec by name, each with its settings and their source.

    >>> sorted(presets("qsgd"))
    ['grace', 'paper']
    """
    return dict(_entry(name).presets)


def _entry(name: str) -> Entry:
    if name not in CODECS:
        raise CompressError(f"no codec is called {name!r}; known: {', '.join(sorted(CODECS))}")
    return CODECS[name]
