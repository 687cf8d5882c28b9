"""Names that were given to things the field has a word for: gone, and not to come back."""

import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Words of no meaning of their own, as names of values.
_PLAIN = (
    *("apart", "aside", "beside", "came", "each", "found", "given", "it", "made", "owed", "said"),
    *("there", "told", "turned", "whole"),
)
# By folder, what is no identifier in it any more.
BANNED = {
    "benchmarks": _PLAIN,
    "examples": _PLAIN,
    "fuzz": _PLAIN,
    "scripts": _PLAIN,
    "sn_cli": _PLAIN,
    "sn_compress": (
        *("Aside", "Carry", "Checked", "Chooser", "Columns", "Fused", "InRounds", "Later"),
        *("MakesChooser", "Memory", "Owed", "Ran", "Said", "Sameness", "SharedExchange", "Size"),
        *("Sorted", "Stepped", "Submission", "Summable", "Told", "Verdict", "Visited"),
        *("apart", "beside", "came", "each", "found", "given", "it", "like_of", "made", "quickest"),
        *("said", "said_of", "stand_in", "steady", "there", "told", "turned", "whole"),
    ),
    "sn_memory": (
        *("Brought", "Kind", "Made", "Marks", "Named", "OnPaper", "Patient", "Planning", "Recent"),
        *("Wanted", "added_ops", "arena_for", "as_it_was", "at_sight", "beside_bytes", "chance"),
        *("cook", "door", "elsewhere", "fewest_again", "glance", "guard", "in_turn", "journeys"),
        *("looked_at", "made_up", "menu", "no_chance", "operate", "owed", "put_off", "rehearsal"),
        *("rehearsed", "resting", "say", "set_chance", "speaking", "stand_for", "taken_apart"),
        *("tell", "underway", "aside", "it", "found", "made", "each", "there", "told", "said"),
        *("came", "begun", "beside", "Course", "course", "courses"),
    ),
}


@pytest.mark.parametrize("package", BANNED)
def test_no_private_word_is_an_identifier(package):
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        text = io.StringIO(path.read_text(encoding="utf-8"))
        for token in tokenize.generate_tokens(text.readline):
            if token.type == tokenize.NAME and token.string in BANNED[package]:
                found.add((token.string, path.relative_to(ROOT).as_posix()))
    assert not found
