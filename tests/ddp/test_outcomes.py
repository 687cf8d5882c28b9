"""Gradients that are thrown away, held or skipped, under the real DDP."""

from __future__ import annotations

from pathlib import Path

RANKS = Path(__file__).parent / "ranks"


def test_what_was_never_applied_is_never_sent_later(ranks, cases_of):
    cases = cases_of(RANKS / "outcomes.py")
    for rank in ranks(2, RANKS / "outcomes.py", timeout=240):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases, rank.output
