"""What kernels return and fake tensors do not show: gradients left out, layouts of convolutions."""

import pytest
import torch
from small_models import mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sn_memory.torch import plan, verify
from sn_memory.torch.trace.fake_rules import FakeMode

SETTINGS = {"profile": False, "time_limit_s": 2.0}
ROWS, IMAGES = (64, 32), (4, 6, 8, 8)
NORMS = {
    "BatchNorm1d": (nn.BatchNorm1d(32), ROWS),
    "BatchNorm2d": (nn.BatchNorm2d(6), IMAGES),
    "BatchNorm2d, eval": (nn.BatchNorm2d(6).eval(), IMAGES),
    "BatchNorm2d, bias alone": (nn.BatchNorm2d(6), IMAGES),
    "BatchNorm3d": (nn.BatchNorm3d(6), (2, 6, 4, 4, 2)),
    "InstanceNorm2d": (nn.InstanceNorm2d(6, affine=True), IMAGES),
    "LayerNorm": (nn.LayerNorm(32), ROWS),
    "GroupNorm": (nn.GroupNorm(2, 6), IMAGES),
    "RMSNorm": (nn.RMSNorm(32), ROWS),
}
NORMS["BatchNorm2d, bias alone"][0].weight.requires_grad_(False)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("before", ["nothing", "a frozen part"])
def test_a_norm_whose_input_needs_no_gradient(name, before):
    norm, size = NORMS[name]
    frozen = [] if before == "nothing" else [nn.Linear(size[-1], size[-1]).requires_grad_(False)]
    model = nn.Sequential(*frozen, norm, mlp(3, size[-1]))
    sample = torch.randn(size)
    planned = plan(model, sample, "90%", backend="graph", **SETTINGS)
    found = verify(planned, sample)
    assert found.equal
    assert found.measured_peak_bytes <= found.predicted_peak_bytes


def masks(count):
    return [[bool(number >> at & 1) for at in range(count)] for number in range(1, 1 << count)]


@pytest.mark.parametrize("mask", masks(3), ids=str)
def test_fake_gradients_are_left_out_where_the_kernels_leave_them_out(mask):
    aten = torch.ops.aten
    x, vector = torch.randn(4, 6, 8, 8), torch.ones(6)
    weight, two = torch.randn(6, 6, 3, 3), torch.ones(4, 2)
    calls = {
        aten.native_batch_norm_backward: (x, x, *[vector] * 5, True, 1e-5, mask),
        aten.batch_norm_backward: (x, x, *[vector] * 5, True, 1e-5, mask, torch.empty(0)),
        aten.native_layer_norm_backward: (
            x,
            x,
            [8],
            x[..., :1],
            x[..., :1],
            x[0, 0, 0],
            x[0, 0, 1],
            mask,
        ),
        aten.native_group_norm_backward: (x, x, two, two, vector, 4, 6, 64, 2, mask),
        aten.convolution_backward: (
            x,
            x,
            weight,
            [6],
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
            mask,
        ),
    }
    mode = FakeMode(allow_non_fake_inputs=True)
    for op, arguments in calls.items():
        faked = [mode.from_tensor(it) if isinstance(it, torch.Tensor) else it for it in arguments]
        with mode:
            fake = op(*faked)
        real = op(*arguments)
        assert [isinstance(it, FakeTensor) for it in fake] == mask, op
        # With that of a bias oneDNN computes the weight's, too.
        assert all(it is not None for it, asked in zip(real, mask, strict=True) if asked), op
        if op is not aten.convolution_backward:
            assert [it is not None for it in real] == mask, op


class FromTokens(nn.Module):
    """A convolution on an image made of tokens: its channels are the last axis in memory."""

    def __init__(self, layer, size):
        super().__init__()
        self.tokens, self.layer, self.size = mlp(2), layer, size

    def forward(self, x):
        x = self.tokens(x).transpose(1, 2).reshape(len(x), 32, *self.size)
        return self.layer(x)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(32, 5, 1), (64,)),
        (nn.Conv2d(32, 5, 1), (8, 8)),
        (nn.Conv2d(32, 5, 1, bias=False), (8, 8)),
        (nn.Conv2d(32, 32, 3, padding=1, groups=32), (8, 8)),
        (nn.ConvTranspose2d(32, 5, 2, stride=2), (8, 8)),
        (nn.Conv3d(32, 5, 1), (4, 4, 4)),
    ],
    ids=str,
)
def test_convolutions_fed_from_tokens(layer, size):
    model, sample = FromTokens(layer, size), torch.randn(4, 64, 32)
    planned = plan(model, sample, "90%", **SETTINGS)
    assert planned.sn_memory.backend == "graph"
    found = verify(planned, sample)
    assert found.equal
    assert found.measured_peak_bytes <= found.predicted_peak_bytes
