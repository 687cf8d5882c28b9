"""Both back ends for every test that asks, and the neighbours a test may import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sn_compress import _native

# pytest imports test files by path, so samples.py and fuzz.py beside them need saying,
# spans_by_hand.py above, and the codecs of benchmarks, which keep the same contract.
HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]


def _core() -> Any:
    core, why = _native.load()
    if core is None:
        text = f"no C++ back end: {why}"
        # CI builds it, so there its absence is a failure.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)
    return core


@pytest.fixture(scope="session")
def core() -> Any:
    """The extension module."""
    return _core()


# Once per module, not per test: Hypothesis runs one test many times inside one fixture.
@pytest.fixture(scope="module", params=["cpp", "numpy"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on the extension, then on the NumPy twins."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpp":
            core = _core()
            patch.setattr(_native, "core", lambda: core)
        else:
            patch.setattr(_native, "core", lambda: None)
        yield request.param
