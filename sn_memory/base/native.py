"""The compiled extension `sn_memory._core`, if it is there.

`pool` and the planner ask `core()` and take their Python twins where the answer is None: the
extension was not built, or SN_MEMORY_BACKEND=python says so. The twins give the same answers, some
fifty to a hundred times slower, so the choice is logged once.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def load() -> tuple[Any, str]:
    """Return the extension module or None, and in a sentence why."""
    wish = os.environ.get("SN_MEMORY_BACKEND", "")
    if wish not in ("", "python", "cpp"):
        raise ValueError(f'SN_MEMORY_BACKEND={wish!r}; expected "python", "cpp" or nothing')
    if wish == "python":
        return None, "python: asked for by SN_MEMORY_BACKEND"
    try:
        return import_module("sn_memory._core"), "cpp: the compiled extension is there"
    except ImportError as missing:
        note = Path(__file__).parents[1] / "_core_missing.txt"  # left by setup.py
        why = note.read_text("utf-8").splitlines()[0] if note.exists() else str(missing)
        reason = f"the compiled extension is not there ({why}); reinstall with a C++17 compiler"
        if wish == "cpp":
            raise ImportError(f"SN_MEMORY_BACKEND=cpp, but {reason}") from missing
        logging.getLogger(__name__).warning(
            "planning and packing in Python, many times slower: %s", reason
        )
        return None, f"python: {reason}"


def core() -> Any:
    """Return the extension module, or None where the Python twins are to run."""
    return load()[0]
