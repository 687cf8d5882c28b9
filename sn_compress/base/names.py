"""Names of variables as ranks can compare them.

Keras numbers layers as they are made, so a rank that has made another model before has "dense_4"
where others have "dense". Numbers are therefore taken by their order: two that are swapped show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?\Z", re.DOTALL)


def relative(names: Sequence[str]) -> list[str]:
    """Each name with "_4" as "#2" if two of its kind here have lower numbers, part by part."""
    parts = [[_NUMBERED.match(part) for part in name.split("/")] for name in names]
    numbers: dict[str, set[int]] = {}
    for found in (found for each in parts for found in each if found):
        numbers.setdefault(found[1], set()).add(int(found[2] or 0))
    order = {kind: sorted(those) for kind, those in numbers.items()}
    return [
        "/".join(f"{m[1]}#{order[m[1]].index(int(m[2] or 0))}" for m in each if m) for each in parts
    ]
