"""Modules that are loaded when they are used: torch's compilers take seconds to import."""

import importlib
from typing import Any


class Late:
    """A module that is imported when it is first asked for something.

    Not importlib's LazyLoader: what that makes is among `sys.modules`, where torch and pytest ask
    all there are for attributes, and so load it in the middle of other imports.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # What pytest asks everything in a module for while it collects.
        if attribute.startswith("_") or attribute == "pytestmark":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
