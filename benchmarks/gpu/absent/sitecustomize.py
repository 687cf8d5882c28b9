"""Hide packages, named in SN_ABSENT, from an interpreter and from all that it starts.

With this folder first in PYTHONPATH, `SN_ABSENT=cupy,horovod` makes `import cupy` raise and
`find_spec("cupy")` return None, as on a machine that lacks them. A finder put before the others
could raise, but not say "not there", which is what most code asks; so PathFinder is replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ABSENT = frozenset(filter(None, os.environ.get("SN_ABSENT", "").split(",")))


class WithoutAbsent(PathFinder):
    """Finds all that PathFinder does, except what is absent."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Like PathFinder's; None for an absent package and what is in it."""
        if fullname.partition(".")[0] in ABSENT:
            return None
        return super().find_spec(fullname, path, target)


if ABSENT:
    sys.meta_path[:] = [
        WithoutAbsent if finder is PathFinder else finder for finder in sys.meta_path
    ]
