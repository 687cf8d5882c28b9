"""The hook on CUDA tensors over NCCL: one rank for each GPU, two at most."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ranks" / "gpu.py"


@pytest.mark.gpu
@pytest.mark.slow
def test_nothing_is_lost_on_gpus(ranks):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    for rank in ranks(min(2, torch.cuda.device_count()), SCRIPT, timeout=240):
        assert rank.returncode == 0, rank.output
        assert "ok" in rank.output
