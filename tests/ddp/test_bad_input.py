"""Bad input in DDP and FSDP2: a CompressError on every rank, soon; cases in ranks/bad_input.py.

Text for a number, a model where a group belongs, ranks that differ, a parameter that came later, an
exception in the middle of a step.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

BAD_INPUT = Path(__file__).parent / "ranks" / "bad_input.py"
NAMES = re.findall(r'^    "([^"]+)": \(?', BAD_INPUT.read_text("utf-8"), flags=re.MULTILINE)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ended(ranks_of_module):
    """All cases in one process group: it takes longer to start than they do."""
    return ranks_of_module(2, BAD_INPUT, timeout=200)


def test_the_cases_are_all_there(ended):
    assert len(NAMES) > 50
    for rank in ended:
        assert rank.returncode == 0, rank.output
        assert len(re.findall(r"^ok ", rank.output, flags=re.MULTILINE)) == len(NAMES), rank.output


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_is_told(ended, name):
    for rank in ended:
        assert f"ok {name}.\n" in rank.output, rank.output[-2000:]
