"""Gradients that lie in memory otherwise than their shapes say: one process with the real DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook
from sn_compress.torch.layout import axes_of, shape_of


class Transposed(nn.Module):
    """A dense layer that keeps its kernel as (in, out)."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(256, 96).mul(0.1).T)

    def forward(self, x):
        return x @ self.kernel.T


def net(layout):
    """Kernels of 7 x 7 are cut between the axes of the picture; the last matrix is transposed."""
    torch.manual_seed(0)
    last = Transposed()
    if layout == torch.contiguous_format:
        last.kernel = nn.Parameter(last.kernel.detach().contiguous())
    layers = [nn.Conv2d(8, 16, 7), nn.ReLU(), nn.Conv2d(16, 16, 7), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, last).to(memory_format=layout)


def trained(layout, ratio):
    model = net(layout)
    named = list(model.named_parameters())
    state = CompressionState(
        LowRankCompression.using(ratio=ratio, warmup=2), named_parameters=named
    )
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(24):
        optimizer.zero_grad()
        pictures = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(step))
        ddp(pictures).square().mean().backward()
        optimizer.step()
    return state


@pytest.mark.parametrize("ratio", [10, 50])
def test_as_much_is_caught(alone, ratio):
    """Of the same gradients in the same bytes; a cut across the memory's order loses more."""
    lies, stands = (
        trained(layout, ratio) for layout in (torch.channels_last, torch.contiguous_format)
    )
    sent, expected = lies.report(), stands.report()
    assert sent["low_rank"] == expected["low_rank"] == 3
    assert sent["payload_bytes"] == pytest.approx(expected["payload_bytes"], rel=0.05)
    assert sent["relative_error"] < 1.02 * expected["relative_error"]
    assert lies.engine.exchange.tensors["5.kernel"].shape == (256, 96)


@pytest.mark.parametrize(("shape", "strides", "axes"), [
    ((), (), []),
    ((5,), (1,), [0]),
    ((8, 3, 5, 5), (75, 25, 5, 1), [0, 1, 2, 3]),
    ((8, 3, 5, 5), (75, 1, 15, 3), [0, 2, 3, 1]),
    ((8, 1, 5, 5), (25, 1, 5, 1), [0, 2, 3, 1]),
    ((4, 6), (1, 4), [1, 0]),
    ((4, 6), (12, 2), [0, 1]),  # not dense: DDP's view is
    ((4, 6), (0, 1), [0, 1]),
    ((4, 6), (1, 8), [0, 1]),
    ((0, 6), (6, 1), [0, 1]),
])  # fmt: skip
def test_order_of_axes(shape, strides, axes):
    assert axes_of(shape, strides) == axes
    assert shape_of(shape, strides) == tuple(shape[axis] for axis in axes)
