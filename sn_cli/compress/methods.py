"""The command `methods`: codecs by name, with settings, presets and back ends."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from sn_compress import backends
from sn_compress.codecs import registry

from ..command import Answer, add_command


def add_methods(commands: Any) -> None:
    """Add the command to its group."""
    add_command(commands, "methods", _methods, help="the codecs, their settings and presets")


def _methods(options: argparse.Namespace) -> Answer:
    rows: list[dict[str, Any]] = []
    for name, entry in sorted(registry.CODECS.items()):
        codec_class = getattr(import_module(entry.module, registry.__package__), entry.cls)
        settings = [key for key in codec_class.__init__.__kwdefaults__ if key not in entry.settings]
        presets = {key: preset.source for key, preset in entry.presets.items()}
        rows.append({"name": name, "settings": settings, "presets": presets})
    text = "\n".join(
        f"  {row['name']:<9} {', '.join(row['settings'])}"
        + (f"\n            presets: {', '.join(row['presets'])}" if row["presets"] else "")
        for row in rows
    )
    here = backends()
    lines = "\n".join(f"{device}: {what}" for device, what in here.items())
    classes = "FFTCompression, LowRankCompression, CastCompression, AutoCompression"
    return Answer(
        f"for optimizers: {classes}\nfor arrays, by sn_compress.codec(name, preset=..., ...):\n"
        f"{text}\n{lines}",
        {"compressions": classes.split(", "), "codecs": rows, "backends": here},
    )
