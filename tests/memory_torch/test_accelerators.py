"""Which devices have memory beside the host's, and what is asked of them."""

import pytest
import torch

from sn_memory.torch.target.accelerator import has_streams, is_apart, synchronize


@pytest.mark.parametrize(
    ("kind", "apart"),
    [("cpu", False), ("meta", False), ("mps", False), ("cuda", True), ("xpu", True), ("ve", False)],
)
def test_memory_is_apart_where_torch_has_a_module_for_it(kind, apart):
    """The memory of an Apple chip is the host's; of what torch has no module, nothing is asked."""
    device = torch.device(kind)
    assert is_apart(device) == apart
    assert has_streams(device) == apart
    if not apart:
        synchronize(device)
