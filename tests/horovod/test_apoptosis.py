"""A net that shrinks under the real Horovod."""

from pathlib import Path

import pytest


@pytest.mark.horovod
@pytest.mark.slow
def test_two_ranks_shrink_alike(horovodrun):
    run = horovodrun(2, Path(__file__).parent / "ranks" / "apoptosis.py", timeout=200)
    run.check()
    assert run.stdout.count("both stopped") == 2


@pytest.mark.horovod
@pytest.mark.slow
def test_compression_a_memory_plan_and_apoptosis_together(horovodrun):
    run = horovodrun(2, Path(__file__).parent / "ranks" / "apoptosis_planned.py", timeout=250)
    run.check()
    assert run.stdout.count("ok ") == 2


@pytest.mark.horovod
@pytest.mark.slow
def test_three_ranks_of_keras_shrink_alike(horovodrun):
    run = horovodrun(3, Path(__file__).parent / "ranks" / "tensorflow_apoptosis.py", timeout=250)
    run.check()
    assert run.stdout.count("all stopped") == 3


@pytest.mark.horovod
@pytest.mark.slow
def test_compression_a_memory_plan_and_apoptosis_together_in_keras(horovodrun):
    ranks = Path(__file__).parent / "ranks" / "tensorflow_apoptosis_planned.py"
    run = horovodrun(2, ranks, "gather", "shared", timeout=280).check()
    assert run.stdout.count("ok gather\n") == run.stdout.count("ok shared\n") == 2
