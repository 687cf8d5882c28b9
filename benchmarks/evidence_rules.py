"""Rules by which evidence.py compares two trees: whether a recorded row got worse.

A rule takes the row of before and the row of after, and yields findings. A finding is worse, or a
difference to be explained. Rules of a whole section take the pairs of all its rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
# The part by which the plan of a search that was cut may be worse: it depends on how much of the
# search fits in its time, which any change of the code moves.
CUT = 0.015


class Finding(NamedTuple):
    """One difference between two trees."""

    worse: bool
    what: str


Rule = Callable[[Row, Row], Iterable[Finding]]
SectionRule = Callable[[Sequence[tuple[Row, Row]]], Iterable[Finding]]


def not_above(field: str, part: float = 0.0) -> Rule:
    """Return the rule that a number is not larger than before, but for so large a part of it."""

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        yield from _numbers(field, before, after, lambda old, new: new > old + abs(old) * part)

    return rule


def not_below(field: str, by: float = 0.0) -> Rule:
    """Return the rule that a number is not smaller than before by more than `by`."""

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        yield from _numbers(field, before, after, lambda old, new: new < old - by)

    return rule


def not_below_part(field: str, part: float) -> Rule:
    """Return the rule that a number is not smaller than before by more than a part of it."""

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        yield from _numbers(field, before, after, lambda old, new: new < old * (1 - part))

    return rule


def holds(field: str) -> Rule:
    """Return the rule that what was true before is true after."""

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        old, new = bool(before.get(field)), bool(after.get(field))
        if old != new:
            yield Finding(old, f"{field}: {old} -> {new}{_because(after)}")

    return rule


def same(field: str) -> Rule:
    """Return the rule that a value, a digest say, is what it was before."""

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        old, new = before.get(field), after.get(field)
        if old != new:
            yield Finding(True, f"{field}: {_change(old, new)}")

    return rule


def same_numbers(field: str, part: float = 1e-9) -> Rule:
    """Return the rule that numbers by name are what they were but for so large a part of them.

    Which names came and which went is told.
    """

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        old, new = before.get(field) or {}, after.get(field) or {}
        if gone := ", ".join(sorted(old.keys() - new.keys())):
            yield Finding(False, f"{field}: gone: {gone}")
        if come := ", ".join(sorted(new.keys() - old.keys())):
            yield Finding(False, f"{field}: new: {come}")
        for name in old.keys() & new.keys():
            if abs(new[name] - old[name]) > part * abs(old[name]):
                yield Finding(True, f"{field}, {name}: {_change(old[name], new[name])}")

    return rule


def reported(field: str) -> Rule:
    """Return the rule that a difference is reported, and never worse."""

    def rule(before: Row, after: Row) -> Iterator[Finding]:
        old, new = before.get(field), after.get(field)
        if old != new:
            yield Finding(False, f"{field}: {_change(old, new)}")

    return rule


def same_plan(before: Row, after: Row) -> Iterator[Finding]:
    """The rule of plans: equal where the search ended by itself, within CUT where it was cut.

    Of a search that ended, other choices are accepted only where neither the peak nor the seconds
    are larger and one of them is smaller. Of one that was cut, neither may be larger by more than
    CUT. A plan that became a refusal is lost; of two refusals the smallest peaks are compared.
    """
    if after.get("absent"):
        if not before.get("absent"):
            yield Finding(True, f"cannot be asked for any more: {after['absent']}")
        return
    if before.get("absent"):
        yield Finding(False, "could not be asked for before")
        return
    if bool(before.get("refused")) != bool(after.get("refused")):
        lost = bool(after.get("refused"))
        yield Finding(lost, "was planned, is refused" if lost else "was refused, is planned")
        return
    fields = ["peak_bytes"] if before.get("refused") else ["peak_bytes", "seconds"]
    ended = before["ended"]
    findings = [
        finding
        for field in fields
        for finding in not_above(field, 1e-9 if ended else CUT)(before, after)
    ]
    chosen = before.get("choices") == after.get("choices")
    if ended and not chosen and not findings:
        yield Finding(True, "other choices of the same peak and seconds")
    elif not chosen:
        yield Finding(False, "other choices")
    yield from findings


def same_height(before: Row, after: Row) -> Iterator[Finding]:
    """The rule of packings: no higher where the search ended by itself, else by CUT at most."""
    yield from not_above("height", 0.0 if before["ended"] else CUT)(before, after)


def modules(before: Row, after: Row) -> Iterator[Finding]:
    """The rule of import closures: no more modules than before; which came and went is told."""
    yield from not_above("count")(before, after)
    old, new = set(before["modules"]), set(after["modules"])
    if old != new:
        text = f"{len(new - old)} new, {len(old - new)} gone; new: {', '.join(sorted(new - old))}"
        yield Finding(False, text)


def median_not_above(field: str, part: float) -> SectionRule:
    """Return the rule that the median over a section of after / before is at most 1 + part."""

    def rule(pairs: Sequence[tuple[Row, Row]]) -> Iterator[Finding]:
        ratios = [
            after[field] / before[field]
            for before, after in pairs
            if before.get(field) and after.get(field)
        ]
        middle = statistics.median(ratios) if ratios else 1.0
        if middle != 1:
            text = f"median {field} is {middle:.3f} of before, at most {1 + part:g} is accepted"
            yield Finding(middle > 1 + part, text)

    return rule


def compared(
    before: Sequence[Row],
    after: Sequence[Row],
    rules: Sequence[Rule],
    section_rules: Sequence[SectionRule] = (),
) -> Iterator[tuple[str, Finding]]:
    """Compare the rows of a section; yield the key of a row, or "", and a finding.

    A row that is not there any more is a lost case. One that crashed counts as not there.
    """
    old = {row["key"]: row for row in before if not row.get("crashed")}
    new = {row["key"]: row for row in after if not row.get("crashed")}
    broken = {row["key"]: row["crashed"] for row in before if row.get("crashed")}
    for row in after:
        if row.get("crashed") and row["key"] not in broken:
            yield row["key"], Finding(True, f"crashed: {row['crashed']}")
    for key in old:
        if key not in new:
            yield key, Finding(True, "lost: there is no such row after")
    pairs = [(key, row, new[key]) for key, row in old.items() if key in new]
    for key, one, other in pairs:
        for rule in rules:
            for finding in rule(one, other):
                yield key, finding
    for section_rule in section_rules:
        for finding in section_rule([(one, other) for _, one, other in pairs]):
            yield "", finding
    for key in new:
        if key not in old:
            yield key, Finding(False, "is new")


def _numbers(
    field: str, before: Row, after: Row, worse: Callable[[float, float], bool]
) -> Iterator[Finding]:
    old, new = before.get(field), after.get(field)
    if old == new or old is None:
        return
    if new is None:
        yield Finding(True, f"{field}: {old} -> nothing{_because(after)}")
        return
    yield Finding(worse(old, new), f"{field}: {_change(old, new)}")


def _change(old: Any, new: Any) -> str:
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (old, new)
    )
    if numbers and old:
        return f"{old:.6g} -> {new:.6g} ({new / old - 1:+.2%})"
    return f"{old} -> {new}"


def _because(row: Row) -> str:
    return f" ({row['reason'][:200]})" if row.get("reason") else ""
