"""Exceptions, warnings, and checks that a framework or the compiled extension is installed.

Every message has four parts: what failed, got, expected, what to do. `BudgetError` is defined with
the plans (`plan/plan.py`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class GraphError(ValueError):
    """A graph, or the file it is read from, is invalid."""


class PlanError(ValueError):
    """A plan, or the file it is read from, cannot be carried out on its graph."""


class PackError(ValueError):
    """Buffers, their file, or their offsets are invalid."""


class CapacityError(RuntimeError):
    """No packing within the capacity was found.

    Attributes
    ----------
    capacity_bytes
        The requested capacity.
    lower_bound_bytes
        No packing is lower than this.
    height_bytes
        Height of the lowest packing found.
    proved
        True: there is no packing within the capacity. False: time ran out.
    """

    def __init__(
        self,
        message: str,
        *,
        capacity_bytes: int,
        lower_bound_bytes: int,
        height_bytes: int,
        proved: bool,
    ) -> None:
        super().__init__(message)
        self.capacity_bytes = capacity_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.height_bytes = height_bytes
        self.proved = proved


class MissingExtra(ModuleNotFoundError):  # noqa: N818 - it is the extra that is missing
    """An optional library or the compiled extension is absent; the message says how to get it."""


def need(library: str, by: str) -> None:
    """Raise MissingExtra if a framework is not installed; the extra has the framework's name."""
    # Looked up, not imported: an error inside the framework does not mean that it is missing.
    if find_spec(library) is None:
        raise MissingExtra(
            f"{by} needs {library}, which is not installed: pip install 'superneurons[{library}]'"
        )


def at_first_use(
    module: str, home: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module whose names are imported at first use.

    home : per name, the module that defines it, relative to this one; "." if it is a module itself
    """
    names = vars(sys.modules[module])

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if home[name] == ".":
            return import_module(f".{name}", module)
        names[name] = getattr(import_module(home[name], module), name)
        return names[name]

    return get, lambda: sorted({*names, *home})


def warn_user(text: str, *libraries: str) -> None:
    """Warn at the line of user code that called in, outside of this package and of libraries.

    libraries : the folders of these libraries
    """
    # The stack depth varies with hooks, wrappers and versions of the libraries.
    inside = (str(Path(__file__).parents[1]), *libraries)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PlanWarning, stacklevel=level)


class PlanWarning(UserWarning):
    """A planned model ran without its plan, or a plan or an estimate leaves something out."""


class AccuracyWarning(UserWarning):
    """The settings are likely to cost accuracy."""


@cache
def core() -> Any:
    """Return the compiled extension `sn_memory._core`; raise MissingExtra if it was not built.

    It has the inner loops of planner and packer, from csrc/memory. Each runs thousands of times per
    plan and takes fifty to a hundred times as long in plain Python, so nothing is planned without
    it.
    """
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
