"""The page of the architecture is what the code says: its pictures, its tables, its files."""

import re
from pathlib import Path

import architecture
import pytest

TEXT = architecture.PAGE.read_text(encoding="utf-8")


def test_pictures_and_tables_are_those_of_the_code():
    assert architecture.filled(TEXT) == TEXT, "run: python scripts/architecture.py"


@pytest.mark.parametrize("package", architecture.WAYS)
def test_a_way_is_one_picture(package):
    lines = architecture.picture(package).split("\n")
    ends = {name for line in lines if " --> " in line for name in line.split() if name != "-->"}
    assert len(ends) == len(architecture.WAYS[package])


def test_arrows_leave_out_what_follows_and_go_over_what_is_not_shown():
    graph = {"a": {"b", "c"}, "b": {"x"}, "x": {"c"}, "c": set()}
    assert architecture.arrows(graph, ["a", "b", "c"]) == [("a", "b"), ("b", "c")]


def test_ten_changes_and_more_name_files_that_are_there():
    for package in architecture.WAYS:
        table = TEXT.partition(f"In `{package}`:")[2].partition("\n\n")[2].partition("\n\n")[0]
        rows = table.strip().split("\n")[2:]
        assert len(rows) >= 10
        for row in rows:
            named = re.findall(rf"`((?:{package}|sn_cli)/[\w./]*)`", row)
            assert named, row
            for path in (*named, *re.findall(r"`((?:csrc|docs|fuzz)/[\w./]*)`", row)):
                assert (architecture.ROOT / path).exists(), path


def test_files_that_both_rims_have_are_there():
    said = TEXT.partition("Inside a rim")[2].partition("## Where")[0]
    for path in re.findall(r"`([\w/]+\.py)`", said):
        for rim in ("torch", "tensorflow"):
            assert Path(architecture.ROOT, "sn_memory", rim, path).exists(), (rim, path)
