"""The hook where tensors are: over NCCL a rank for each GPU, two at most; over Gloo two on one."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ranks" / "gpu.py"
KINDS = [
    pytest.param("cuda", "nccl", marks=pytest.mark.gpu("nccl"), id="cuda-nccl"),
    pytest.param("cuda", "gloo", marks=pytest.mark.gpu, id="cuda-gloo"),
    # The same script, so that it stays whole where there is no GPU.
    pytest.param("cpu", "gloo", id="cpu-gloo"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend"), KINDS)
def test_nothing_is_lost_and_ranks_end_equal(ranks, device, backend):
    torch = pytest.importorskip("torch")
    number = min(2, torch.cuda.device_count()) if backend == "nccl" else 2
    for rank in ranks(number, SCRIPT, device, backend, timeout=240):
        assert rank.returncode == 0, rank.output
        assert "ok" in rank.output
