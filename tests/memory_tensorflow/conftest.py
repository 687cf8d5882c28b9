"""What these tests share: a cache of costs of their own, fixed seeds."""

import keras
import pytest


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path_factory):
    """No file of ours in the user's folder; one cache for all tests, as ops repeat."""
    base = tmp_path_factory.getbasetemp() / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    keras.utils.set_random_seed(0)
