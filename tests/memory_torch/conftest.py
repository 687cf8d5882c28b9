"""What these tests share: one thread, a cache of times of their own, the benchmarks' networks."""

import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[2] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """One thread, so that sums are taken in one order; no file of ours in the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
