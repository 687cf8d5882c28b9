"""tune=True on real ranks: all decide alike, and nothing is lost on the way back to plain."""

from __future__ import annotations

from pathlib import Path

import pytest

from sn_compress import CompressError
from sn_compress.settings import Settings

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.horovod
@pytest.mark.slow
def test_ranks_take_up_compression_and_give_it_up_together(horovodrun):
    run = horovodrun(2, RANKS / "tune.py", timeout=240).check()
    for exchange in ("shared", "gather"):
        assert run.stdout.count(f"ok {exchange}\n") == 2, run.stdout


def test_where_it_would_have_no_effect_it_is_an_error():
    Settings().refuse_torch_only("anything")
    for setting in ("tune", "overlap"):
        settings = Settings().changed(**{setting: True})
        with pytest.raises(CompressError, match=f"{setting}=True has no effect with.*Keras"):
            settings.refuse_torch_only("TensorFlow and Keras")
    with pytest.raises(CompressError, match="overlap belongs to the shared exchange"):
        Settings().changed(exchange="gather", overlap=True)
