"""Settings of the whole process: `sn_memory.settings.progress = False`.

Progress output and deterministic planning are not properties of one model: a program that logs, or
whose ranks must plan alike, wants them for every plan, including those made while training.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

from .base.progress import ProgressOption

# Count work instead of seconds, as in `plan_graph`, so that slow, fast and busy machines make the
# same plan. Needs `profile=False`, and excludes the back ends that measure seconds (`modules`,
# `layers`); `auto` does not fall back to them.
deterministic: bool = False
# None: one line of progress on standard error, if that is a terminal. True: always, in several
# lines where it is not a terminal. False: never. A function: called with each `sn_memory.Progress`.
progress: ProgressOption = None

_NAMES: Final = ("deterministic", "progress")


class _Settings(ModuleType):
    """Refuses unknown names: a misspelt setting would have no effect."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _NAMES and not name.startswith("__"):
            raise AttributeError(f"got setting {name!r}, expected one of {', '.join(_NAMES)}.")
        if name == "deterministic" and not isinstance(value, bool):
            raise TypeError(f"got settings.deterministic {value!r}, expected True or False.")
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Settings


def check_profile(*, profile: bool, backend: str, measuring: str) -> None:
    """Raise ValueError if seconds would be measured although `deterministic` is set.

    measuring : the back end that always measures
    """
    if deterministic and (profile or backend == measuring):
        got = "profile=True" if profile else f"backend={backend!r}"
        raise ValueError(
            f"got {got} with sn_memory.settings.deterministic, but measured seconds differ from "
            "run to run. Pass profile=False, a device whose speeds are to be used, and another "
            "back end."
        )
