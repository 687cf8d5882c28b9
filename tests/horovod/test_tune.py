"""AutoCompression on real ranks: all decide alike, and nothing is lost on the way back to plain."""

from __future__ import annotations

from pathlib import Path

import pytest

from sn_compress import AutoCompression, CompressError, FFTCompression, LowRankCompression

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.horovod
@pytest.mark.slow
def test_ranks_take_up_compression_and_give_it_up_together(horovodrun):
    run = horovodrun(2, RANKS / "tune.py", timeout=240).check()
    assert run.stdout.count("ok\n") == 2, run.stdout


@pytest.mark.horovod
@pytest.mark.slow
def test_tensorflow_graphs_follow_the_tuner(horovodrun, cases_of):
    cases = cases_of(RANKS / "tensorflow_tune.py")
    run = horovodrun(2, RANKS / "tensorflow_tune.py", timeout=240).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


def test_overlap_where_it_would_have_no_effect_is_an_error():
    for works in (FFTCompression, LowRankCompression, AutoCompression):
        works.settings.refuse_overlap("anything")
    for refused in (LowRankCompression, AutoCompression):
        with pytest.raises(CompressError, match=r"overlap=True has no effect with.*Keras"):
            refused.using(overlap=True).settings.refuse_overlap("TensorFlow and Keras")
