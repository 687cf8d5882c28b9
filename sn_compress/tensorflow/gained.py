"""Adds methods to a Keras optimizer by changing its class to a subclass of the same name.

Wrapping it in another optimizer would hide its settings and variables.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)


def become(optimizer: Any, gained: type, own: Any) -> Any:
    """Add the methods of class `gained`, and `own` as `_sn`, to an optimizer, and return it."""
    cls: Any = type(optimizer)

    def warn() -> None:
        _log.warning(
            "a copy of this %s, or what is made of its config, is a plain one, which exchanges "
            "nothing with other ranks: wrap it as well",
            cls.__name__,
        )

    def rebuilt(_: type, *args: Any, **settings: Any) -> Any:
        warn()
        return cls(*args, **settings)

    def reduced(self: Any) -> Any:
        warn()
        return cls._unpickle_model, cls.__reduce__(self)[1]

    # Keras saves an optimizer under the module and name of its class.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    changed = {**names, "__new__": rebuilt, "__reduce__": reduced}
    # Bypass Keras's own __setattr__, which would track the value.
    object.__setattr__(optimizer, "_sn", own)
    object.__setattr__(optimizer, "__class__", type(cls.__name__, (gained, cls), changed))
    return optimizer
