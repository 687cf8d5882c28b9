"""What holds for all plans of a process: `sn_memory.settings.progress = False`.

Progress, and whether work is counted in place of seconds, are no properties of one model: a program
that logs, or whose ranks must plan alike, wants it of every plan, those made while training
included.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

from .base.progress import ProgressOption

# Count work in place of seconds, as `plan_graph` does: the same plan on a slow and on a fast
# machine, whatever its load. With `profile=False`, and neither by modules nor by layers, whose
# seconds are measured; `auto` does not fall back to them.
deterministic: bool = False
# None writes to standard error how far planning is, where that is a terminal: in one line. True
# writes in any case, elsewhere in several; False never. A function takes a `sn_memory.Progress`
# each time.
progress: ProgressOption = None

_NAMES: Final = ("deterministic", "progress")


class _Settings(ModuleType):
    """Refuses names that are no settings: a misspelt one would change nothing."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _NAMES and not name.startswith("__"):
            raise AttributeError(f"got setting {name!r}, expected one of {', '.join(_NAMES)}.")
        if name == "deterministic" and not isinstance(value, bool):
            raise TypeError(f"got settings.deterministic {value!r}, expected True or False.")
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Settings


def check_profile(*, profile: bool, backend: str, measuring: str) -> None:
    """Raise ValueError for what measures seconds, where the plan is to be the same anywhere.

    measuring : the back end that does so in any case
    """
    if deterministic and (profile or backend == measuring):
        got = "profile=True" if profile else f"backend={backend!r}"
        raise ValueError(
            f"got {got} with sn_memory.settings.deterministic, and measured seconds differ from "
            "run to run. Pass profile=False, a device whose speeds are to count, and another back "
            "end."
        )
