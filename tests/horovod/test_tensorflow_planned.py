"""Planned training on real ranks: the plan changes memory, and nothing that the ranks exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = [pytest.mark.horovod, pytest.mark.slow]


def test_planned_steps_and_models_train_as_the_plain_ones(horovodrun):
    cases = ["stepped", "low_rank", "fitted"]
    run = horovodrun(2, RANKS / "tensorflow_planned.py", *cases, timeout=280).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == 2, f"{case}\n{run.stdout}"
