"""The hook where tensors are: over NCCL a rank for each GPU, two at most; over Gloo two on one."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ranks" / "gpu.py"


@pytest.mark.slow
@pytest.mark.parametrize("backend", [
    pytest.param("nccl", marks=pytest.mark.gpu("nccl")), pytest.param("gloo", marks=pytest.mark.gpu)
])  # fmt: skip
def test_nothing_is_lost_and_ranks_end_equal(ranks, backend):
    """On the CPU test_ddp.py runs the same."""
    torch = pytest.importorskip("torch")
    number = min(2, torch.cuda.device_count()) if backend == "nccl" else 2
    for rank in ranks(number, SCRIPT, backend, timeout=240):
        assert rank.returncode == 0, rank.output
        assert "ok" in rank.output
