"""A net that shrinks under the real Horovod."""

from pathlib import Path

import pytest


@pytest.mark.horovod
@pytest.mark.slow
def test_two_ranks_shrink_alike(horovodrun):
    run = horovodrun(2, Path(__file__).parent / "ranks" / "apoptosis.py", timeout=200)
    run.check()
    assert run.stdout.count("both stopped") == 2
