"""The tracker counts what lives, and nothing twice."""

import torch

from sn_memory.torch import StorageTracker


def test_views_count_once_and_the_dead_not_at_all():
    x = torch.zeros(1000)
    with StorageTracker([x]) as tracker:
        y = x + 1
        z = y.view(10, 100)[2:]
        assert tracker.live_bytes == 8000
        del y
        assert tracker.live_bytes == 8000
        del z
        assert tracker.live_bytes == 4000
        x.exp().log()
    assert tracker.start_bytes == 4000
    assert tracker.peak_bytes == 12000
    assert tracker.peak_op == "aten.log.default"


def test_what_is_kept_for_backward_counts():
    x = torch.zeros(1000, requires_grad=True)
    with StorageTracker([x]) as tracker:
        y = x.exp().exp().exp()
        assert tracker.live_bytes == 16000
        y.sum().backward()
        del y
        # x and its gradient.
        assert tracker.live_bytes == 8000


def test_storages_resized_are_seen():
    """As FSDP2 does with what it gathers: freed and taken again, beside all ops."""
    x = torch.zeros(1000)
    with StorageTracker([x]) as tracker:
        y = x + 1
        y.untyped_storage().resize_(0)
        assert tracker.live_bytes == 4000
        y.untyped_storage().resize_(8000)
        assert tracker.live_bytes == 12000
        y.resize_(3000)
        assert tracker.live_bytes == 16000
        del y
        assert tracker.live_bytes == 4000
    assert tracker.peak_bytes == 16000


def test_rounding_and_ignoring_and_every_call_is_heard():
    ignored, heard = torch.zeros(50), []
    with StorageTracker(allocator="torch", ignored=[ignored], heard=heard.append) as tracker:
        kept = torch.ones(1) * ignored[:1]
    assert tracker.live_bytes == 512
    assert max(heard) == tracker.peak_bytes == 1024
    assert kept.numel() == 1
