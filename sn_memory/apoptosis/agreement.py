"""All ranks do the same, or all stop: what a rim does with the hashes that ranks have exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


class AgreementError(RuntimeError):
    """Ranks came to different decisions; raised on all of them, and nothing was changed."""


def digest(text: str) -> bytes:
    """Return the 32 bytes that ranks compare."""
    return hashlib.sha256(text.encode()).digest()


def check_same(what: str, text: str, every: Sequence[bytes]) -> None:
    """Raise AgreementError unless the digests of all ranks are that of `text`."""
    mine = digest(text)
    ours = [rank for rank, other in enumerate(every) if other == mine]
    if len(ours) < len(every):
        others = sorted(set(range(len(every))) - set(ours))
        raise AgreementError(
            f"Apoptosis: {what} of this rank is that of ranks {ours} and not of ranks {others}; "
            "expected the same on all. Nothing was changed. Ranks must hold the same weights and "
            f"settings, and call step() equally often. Here: {text[:300]}"
        )
