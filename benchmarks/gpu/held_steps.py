"""Bytes that planned steps hold by torch's allocator, scratch included (held_bytes.py)."""

from __future__ import annotations

from functools import partial

from gpu.section import CannotError, Section, main

BUDGETS = (60, 80)
DRY = ("ViT",)  # the fewest seconds of planning


def of_net(section: Section, name: str) -> None:
    """Plan and measure a network at each budget."""
    from held_bytes import rows_of

    job = {"network": name, "threads": 1, "isa": "default", "device": section.device}
    try:
        rows = rows_of(job | {"budgets": BUDGETS[: 1 if section.dry else None]})
    except ImportError as missing:
        raise CannotError(str(missing)) from missing
    for row in rows:
        section.row(**row)
        what = f"{name} at {row['asked']} %"
        section.target(f"held over budget: {what}", row["held_bytes"] / row["budget_bytes"], most=1)
        section.target(
            f"% held over promised: {what}",
            100 * (row["held_bytes"] / row["promised_bytes"] - 1),
            most=2,
        )


def measure(section: Section) -> None:
    """All networks that there is time for."""
    try:
        from held_nets import NETS
    except ImportError as missing:
        raise CannotError(str(missing)) from missing
    for name in DRY if section.dry else NETS:
        section.part(name, partial(of_net, section, name), least_s=5)


if __name__ == "__main__":
    main("held_steps", measure)
