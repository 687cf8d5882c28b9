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


def test_where_it_would_have_no_effect_it_is_an_error():
    for works in (FFTCompression, LowRankCompression):
        works.settings.refuse_torch_only("anything")
    for refused, words in (
        (AutoCompression, "AutoCompression with TensorFlow and Keras.*LowRankCompression"),
        (LowRankCompression.using(overlap=True), "overlap=True has no effect with.*Keras"),
    ):
        with pytest.raises(CompressError, match=words):
            refused.settings.refuse_torch_only("TensorFlow and Keras")
