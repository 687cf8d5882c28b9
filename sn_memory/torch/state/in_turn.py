"""The step of an optimizer whose gradients are on the host: one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .owned import Brought, Owned


def update_in_turn(
    row: Sequence[Owned], needs: Mapping[str, tuple[int, int]], room_bytes: int
) -> None:
    """Update parameters whose gradients are on the host.

    The next is fetched, and those before are written, beside an update where there is room.

    Parameters
    ----------
    row
        Parameters, with gradients.
    needs
        Per path, bytes that an update brings, and that it holds beside them.
    room_bytes
        The budget without what is on the device anyway.
    """
    writing: list[tuple[int, Callable[[], None]]] = []
    coming: Callable[[], Brought] | None = None
    try:
        for at, owned in enumerate(row):
            brought, scratch = needs[owned.name]
            room = room_bytes - brought - scratch
            if coming is None:
                while writing:
                    writing.pop(0)[1]()
                coming = owned.bring_all()
            arrive, coming = coming, None
            following = needs[row[at + 1].name][0] if at + 1 < len(row) else room + 1
            ahead = following if following <= room else 0
            while writing and sum(it for it, _ in writing) + ahead > room:
                writing.pop(0)[1]()
            if following <= room:
                coming = row[at + 1].bring_all()
            here = arrive()
            del arrive
            writing.append((brought, owned.put_back(here)))
            del here
    finally:
        if coming is not None:
            coming()
        for _, wait in writing:
            wait()
