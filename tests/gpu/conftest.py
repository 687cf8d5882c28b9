"""Tests that need torch alone, and run on a GPU and, so that they stay whole, on the CPU as well.

A test takes `device` and runs once on each; the run on "cuda" has the mark gpu. In a process of
its own, which `tests/mock_device/test_gpu_tests.py` starts, they run on the mock device.
"""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
TESTS = Path(__file__).resolve().parents[1]
for folder in ("memory_torch", "apoptosis", "ddp", "mock_device"):
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("SN_TEST_DEVICE") == "mock":
    import mock_device

    DEVICES = [str(mock_device.start())]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """One thread, seeds, exact products; no file of ours in the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alone(device, tmp_path):
    """A process group of this process, of the device's own back end: NCCL needs no partner."""
    import torch.distributed as dist

    cuda = device.type == "cuda"
    if device.type == "mock":
        from alone_group import init_alone

        init_alone(device.type, tmp_path / "meet")
        yield
        dist.destroy_process_group()
        return
    if cuda and not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    given = {"device_id": torch.device("cuda", 0)} if cuda else {}
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1,
        **given,
    )  # fmt: skip
    yield
    dist.destroy_process_group()
