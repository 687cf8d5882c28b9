"""Codecs that only benchmarks use, by name, in addition to those of sn_compress.

from rivals.codecs import codec
payload = codec("dgc", theta=0.99).encode(gradient)

They keep the contract of `sn_compress.Codec`, and no class of sn_compress needs one of them:
docs/decisions/0076 says why they are here. README.md beside this file says how each differs from
what its authors publish. Their ids (2, 3, 19, 21, 23) are given to no other codec.
"""

from __future__ import annotations

from typing import Any, Final

from sn_compress import Codec
from sn_compress.codecs import registry
from sn_compress.codecs.registry import GRACE, Entry, Preset

RIVALS: Final[dict[str, Entry]] = {
    "auto": Entry("rivals.codecs.auto", "AutoCodec"),
    "lowrank": Entry("rivals.codecs.lowrank", "LowRankCodec"),
    "dgc": Entry(
        "rivals.codecs.dgc",
        "DGCCodec",
        presets={
            "grace": Preset(
                {"theta": 0.7, "momentum": 0.3, "indices": "int64"},
                f"{GRACE}/compressor/dgc.py and memory/dgc.py; compress_ratio 0.3 and momentum "
                "0.3 are helper.py's defaults. Its clipping needs all ranks and is left out",
            ),
            "paper": Preset(
                {"theta": 0.999, "momentum": 0.9},
                "Lin et al. 2018: 0.1 %, momentum 0.9; set warmup to the steps of an epoch",
            ),
        },
    ),
    "demo": Entry(
        "rivals.codecs.demo",
        "DeMoCodec",
        presets={
            "paper": Preset(
                {"topk": 32, "edge": 64, "decay": 0.999},
                "DeMo's published defaults (arXiv 2411.19870, bloc97/DeMo 0e48145)",
            )
        },
    ),
    "powersgd": Entry(
        "rivals.codecs.powersgd",
        "PowerSGDCodec",
        presets={
            "torch": Preset(
                {"rank": 1},
                "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook: rank 1, warm start, "
                "error feedback",
            )
        },
    ),
}
# Those of the package first.
CODECS: Final[dict[str, Entry]] = registry.CODECS | RIVALS


def codec(name: str, *, preset: str | None = None, **settings: Any) -> Codec:
    """As `sn_compress.codec`, of all names in CODECS."""
    return registry.make(CODECS, name, preset, settings)


def presets(name: str) -> dict[str, Preset]:
    """As `sn_compress.presets`, of all names in CODECS."""
    return dict(registry.find(CODECS, name).presets)
