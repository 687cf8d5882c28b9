"""Names of messages, by which Horovod finds what belongs together on all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def prefix(kind: str, process_set: Any) -> str:
    """What the names of one more optimizer or loader of these ranks begin with.

    kind : which of them it is
    process_set : of Horovod, whose ranks make it, in the same order. Counted by them, as a rank
        that is outside makes none, and yet is in other sets with those inside
    """
    key = kind, tuple(process_set.ranks or range(process_set.size()))
    _made[key] += 1
    return f"{kind}.{_made[key] - 1}"
