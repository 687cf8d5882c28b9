"""docs/papers.md: no claim without the command that measured ours, or the word that none did."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "papers.md"
HEAD = ["claim", "its conditions", "ours", "command", "rows", "verdict"]
CLAIMS = (
    "3.24 times", "2.26 times", "1.31 times", "1.25 times", "1.47 times", "13.5 times", "1.8 times",
    "100 % compute efficiency on 128", "2.44 times", "30 times fewer", "0.88 to 0.94",
)  # fmt: skip


def rows_of(text):
    """Cells of each row of the table, its head first."""
    table = re.search(r"<!-- papers:start -->\n(.*?)<!-- papers:end -->", text, re.DOTALL)[1]
    lines = [line.strip().strip("|").split("|") for line in table.splitlines()]
    head, ruler, *rows = [[cell.strip() for cell in line] for line in lines]
    assert head == HEAD
    assert set("".join(ruler)) <= set("- ")
    return rows


def check(row, check_command):
    """Assert that a row says how ours was found, or that it was not."""
    assert len(row) == len(HEAD), row
    assert all(row), f"an empty cell in {row}"
    _, _, ours, command, files, verdict = row
    commands = re.findall(r"`([^`]+)`", command)
    assert commands or "not measured" in ours, f"neither a command nor 'not measured': {row[0]}"
    for words in map(shlex.split, commands):
        scripts = [word for word in words if word.endswith(".py")]
        assert scripts or "benchmarks" in words, f"no benchmark or script in {words}"
        check_command(words)
    for name in re.findall(r"[\w.]+\.json", files):
        assert (ROOT / "benchmarks" / "results" / name).exists(), f"{name} is not there"
    assert re.search(r"\.json|\]\(", files), f"no rows and no page: {row[0]}"
    assert "**" in verdict, f"no plain word: {row[0]}"
    # What was not run under the name it is told by must not read as if it had been.
    if "not measured" in ours:
        assert "**Not measured" in verdict, row[0]


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


def test_each_row_has_a_command_that_exists_or_says_not_measured(check_command):
    for row in ROWS:
        check(row, check_command)
    for claim in CLAIMS:
        assert any(claim in row[0] for row in ROWS), f"no row of the headline {claim}"


GOOD = ["a claim", "GPUs", "2 times", "`python -m benchmarks links`", "links.json", "**Reached.**"]


def test_a_row_that_says_less_is_found(check_command):
    check(GOOD, check_command)
    for place, text in (
        (3, "by hand"), (3, "`python -m benchmarks no_such`"), (3, "`make all`"),
        (3, "`python -m benchmarks links --no-such-flag`"), (4, "no_such.json"), (4, "somewhere"),
        (5, "reached"), (2, ""), (2, "not measured"),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            check([*GOOD[:place], text, *GOOD[place + 1 :]], check_command)
