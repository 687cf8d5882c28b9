"""use_placing_allocator where there is no GPU: what it asks torch for, and clear refusals."""

import ctypes
from unittest.mock import Mock, call

import pytest
import torch

from sn_memory.pool.placing import PlacingAllocator, library_path
from sn_memory.run.reserved import PlacingSettings
from sn_memory.torch import placing_statistics, use_placing_allocator
from sn_memory.torch.target import allocator as placing
from sn_memory.torch.target.accelerator import COUNTED, memory_of
from sn_memory.torch.target.capacity import planned_settings

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the library was not built")


@pytest.fixture
def cuda(monkeypatch):
    """What is opened in place of CUDA's runtime; what torch has for CUDA notes what it is asked."""
    opened = []

    def over_host(source):
        opened.extend([source, PlacingAllocator("host")])
        return opened[1]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("CUDAPluggableAllocator", "change_current_allocator"):
        monkeypatch.setattr(torch.cuda.memory, name, Mock())
    monkeypatch.setattr(placing, "PlacingAllocator", over_host)
    monkeypatch.setattr(placing, "_active", None)
    yield opened
    COUNTED.clear()
    for allocator in opened[1:]:
        allocator.close()


def test_it_is_torchs_allocator_from_then_on(cuda):
    assert not isinstance(planned_settings(), PlacingSettings)
    use_placing_allocator()
    use_placing_allocator()  # once is enough
    assert cuda[0] == "libcudart.so.13"
    assert len(cuda) == 2
    path, made = str(library_path()), torch.cuda.memory.CUDAPluggableAllocator
    made.assert_called_once_with(path, "sn_placing_malloc", "sn_placing_free")
    torch.cuda.memory.change_current_allocator.assert_called_once_with(made.return_value)
    library = ctypes.CDLL(path)
    hooks = {
        "set_reset_fn": library.sn_placing_trim,
        "set_record_stream_fn": library.sn_placing_record_stream,
        "set_begin_allocate_to_pool": library.sn_placing_refuse_pool,
    }
    assert made.return_value.allocator.return_value.method_calls == [
        getattr(call, name)(ctypes.cast(function, ctypes.c_void_p).value)
        for name, function in hooks.items()
    ]
    assert isinstance(planned_settings(), PlacingSettings)
    device = torch.device("cuda", 0)
    at = cuda[1].allocate(1 << 20)
    counts = memory_of(device)
    assert counts.memory_allocated(device) == counts.max_memory_allocated(device) == 1 << 20
    assert counts.memory_reserved(device) == 2 << 20
    cuda[1].release(at)
    counts.reset_peak_memory_stats(device)
    assert counts.max_memory_allocated(device) == 0
    assert placing_statistics(device).reserved_bytes == 2 << 20
    assert placing_statistics(1).reserved_bytes == 0


def test_too_late_is_an_error_and_changes_nothing(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="after CUDA was first used; expected before"):
        use_placing_allocator()
    assert not cuda
    with pytest.raises(RuntimeError, match="torch's own allocator; expected use_placing"):
        placing_statistics()


def test_where_torch_refuses_it_can_be_tried_again(cuda):
    error = RuntimeError("Can't swap an already initialized allocator")
    torch.cuda.memory.change_current_allocator.side_effect = error
    with pytest.raises(RuntimeError, match="already initialized"):
        use_placing_allocator()
    assert placing.active() is None
    PlacingAllocator("host").close()  # nothing was left open


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_cuda_it_is_an_error():
    with pytest.raises(RuntimeError, match="a torch without CUDA; expected one built for CUDA"):
        use_placing_allocator()
