"""The lines by which plans of both kinds show themselves, and seconds as people write them."""

from __future__ import annotations

from collections.abc import Iterable

from .sizes import show_bytes


def show_seconds(seconds: float) -> str:
    """Return a time for people.

    >>> show_seconds(0.0123), show_seconds(0)
    ('12.3 ms', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def peak_line(budget_bytes: int | None, before: int, after: int) -> str:
    """Return budget and peaks; a peak of 0 was neither predicted nor measured.

    >>> peak_line(2048, 4096, 1024)
    'budget 2 KiB, peak 4 KiB -> 1 KiB (-75 %)'
    """
    budget = "no budget" if budget_bytes is None else f"budget {show_bytes(budget_bytes)}"
    if not after:
        return f"{budget}, peak not measured"
    if not before:
        return f"{budget}, peak {show_bytes(after)}"
    cut = f"{100 * (after / before - 1):+.0f} %"
    return f"{budget}, peak {show_bytes(before)} -> {show_bytes(after)} ({cut})"


def decided_line(decisions: Iterable[tuple[str, int]], what: str) -> str:
    """Return how many things each technique has, with their bytes; `decisions` are both of each.

    >>> decided_line([("keep", 1), ("recompute", 1024), ("recompute_each", 1024)], "storages")
    'of 3 storages 2 recomputed (2 KiB), 0 offloaded'
    """
    each = list(decisions)
    parts = []
    for word, kinds in (
        ("recomputed", ("recompute", "recompute_each")),
        ("offloaded", ("offload",)),
    ):
        sizes = [size for technique, size in each if technique in kinds]
        parts.append(f"{len(sizes)} {word}" + (f" ({show_bytes(sum(sizes))})" if sizes else ""))
    return f"of {len(each)} {what} {', '.join(parts)}"


def seconds_line(before: float, after: float) -> str:
    """Return seconds of a step without the plan and with it.

    >>> seconds_line(0.1, 0.11)
    'a step takes 100 ms -> 110 ms (+10.0 %)'
    """
    if not before:
        return f"a step takes {show_seconds(after)}"
    extra = f"{100 * (after / before - 1):+.1f} %"
    return f"a step takes {show_seconds(before)} -> {show_seconds(after)} ({extra})"
