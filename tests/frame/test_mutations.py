"""What a fault is, and what the tests of a toy package of one file say of some."""

from __future__ import annotations

import time

import mutations
import pytest

SOURCE = '''
LIMIT: int = 3


def clipped(number, low=0):
    """Return a number within the limits."""
    if number < low:
        raise ValueError(f"{number + 1}")
    print(number)
    return min(number, LIMIT) * 2
'''
TEST = """
import toy


def test_toy():
    assert toy.clipped(2) == 4
    assert toy.clipped(9) == 6
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.py").write_text(SOURCE)
    (tmp_path / "test_toy.py").write_text(TEST)
    return tmp_path


def test_faults_are_drawn_by_a_seed_one_of_a_line(toy):
    files = [toy / "toy.py"]
    every = [mutations.drawn(files, 5, seed, toy) for seed in range(20)]
    assert mutations.drawn(files, 2, 0, toy) == every[0][:2]
    assert all(len({mutant.line for mutant in each}) == 5 for each in every)
    changes = {mutant[1:3] for each in every for mutant in each}
    assert changes == {
        (2, "3 -> (4)"), (5, "0 -> (1)"), (7, "number < low -> (number <= low)"),
        (9, "print(number) -> pass"), (10, "min(number, LIMIT) * 2 -> (min(number, LIMIT) / 2)"),
        (10, "2 -> (3)"),
    }  # fmt: skip


@pytest.mark.slow
def test_what_the_tests_say(toy):
    said = {}
    for mutant in mutations.drawn([toy / "toy.py"], 5, 1, toy):
        row = mutations.outcome(toy, mutant, [["test_toy.py"]], "", 100)
        said[row["line"]] = row["outcome"], row["by"]
        assert (toy / "toy.py").read_text() == SOURCE
    caught = "caught", "test_toy.py::test_toy"
    assert said == {2: caught, 5: ("survived", ""), 7: ("survived", ""), 9: ("survived", ""),
                    10: caught}  # fmt: skip


def test_a_failure_without_a_change_is_no_catch_and_the_limit_ends_what_hangs(toy):
    (mutant,) = mutations.drawn([toy / "toy.py"], 1, 0, toy)
    (toy / "test_toy.py").write_text("def test_toy():\n    assert not 1\n")
    with pytest.raises(SystemExit, match="test_toy fails without a change, too"):
        mutations.outcome(toy, mutant, [["test_toy.py"]], "", 100)
    (toy / "test_toy.py").write_text("def test_toy():\n    while True:\n        pass\n")
    began = time.monotonic()
    assert mutations.outcome(toy, mutant, [["test_toy.py"]], "", 2)["outcome"] == "unfinished"
    assert time.monotonic() - began < 60
