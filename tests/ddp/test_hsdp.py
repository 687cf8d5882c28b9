"""What hsdp_hook makes of a state's settings; tests/ddp/ranks/behave.py has replicas that train."""

import pytest
import torch
import torch.distributed as dist

from sn_compress import CompressError
from sn_compress.torch.ddp import FFTState
from sn_compress.torch.fsdp import hsdp_hook

N = 100_000


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"ratio": 50.0}, {"min_elements": 64}], ids=str)
def test_a_ratio_of_two_is_not_taken_for_a_hundred(settings):
    with pytest.raises(CompressError, match=r'a ratio of 2 .*exchange="gather"'):
        hsdp_hook(FFTState(**settings), "layer")


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({"exchange": "gather"}, 100, 150),  # 41 bins of 2049: two codes and a position each
        ({"exchange": "shared", "warmup": 1}, 1, 2.1),
    ],
    ids=str,
)
def test_what_was_asked_for_by_name_is_done(alone, settings, low, high):
    state = FFTState(**settings)
    average = hsdp_hook(state, "layer")
    for _ in range(20):
        average(torch.randn(N))
    assert low < state.report()["ratio"] < high
