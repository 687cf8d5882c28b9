"""The compiled extension `sn_memory._core`: the loops of planner and packer, from csrc/memory.

Each of them runs thousands of times for one plan, and in plain Python some fifty to a hundred times
as long: minutes become hours. So there is no plan without the extension, and the error says how to
build it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import MissingExtra


@cache
def core() -> Any:
    """Return the extension module; raises MissingExtra where it was not built."""
    try:
        return import_module("sn_memory._core")
    except ImportError as missing:
        note = Path(__file__).parents[1] / "_core_missing.txt"  # left by setup.py
        why = note.read_text("utf-8").splitlines()[0] if note.exists() else f"{missing}."
        raise MissingExtra(
            "sn_memory plans and packs with its compiled extension sn_memory._core, which cannot "
            f"be loaded. {why} Install a C++17 compiler and Python's headers (Debian and Ubuntu: "
            "apt-get install g++ python3-dev), then install superneurons again."
        ) from missing
