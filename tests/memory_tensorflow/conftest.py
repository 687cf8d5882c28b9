"""What these tests share: a cache of costs of their own, fixed seeds; Keras, or they skip."""

import importlib.util
import sys
from pathlib import Path

import pytest

MISSING = [name for name in ("tensorflow", "keras") if importlib.util.find_spec(name) is None]

# For keras_samples.py.
sys.path.append(str(Path(__file__).parent))


class Skipped(pytest.Module):
    """A file of tests that is not imported, as what it imports first is not there."""

    def collect(self):
        pytest.skip(f"{' and '.join(MISSING)} not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Skip files whole where TensorFlow is missing: all of them import it at their top."""
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path_factory):
    """No file of ours in the user's folder; one cache for all tests, as ops repeat."""
    import keras

    base = tmp_path_factory.getbasetemp() / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    keras.utils.set_random_seed(0)
