"""What kernels return and fake tensors do not show: gradients left out, layouts of convolutions."""

import copy

import pytest
import torch
from small_models import mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sn_memory.torch import plan, verify
from sn_memory.torch.trace.fake import FakeMode

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


@pytest.mark.parametrize(
    ("name", "before"), [(it, ("nothing", "a frozen part")[at % 2]) for at, it in enumerate(NORMS)]
)
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
    mode = FakeMode()
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


def mixed_norms(dtype):
    """Results of norms forward and backward, input of one type and parameters of float32."""
    aten, found = torch.ops.aten, {}
    x, rows, vector = (
        torch.randn(4, 8, 6, dtype=dtype),
        torch.randn(24, 8, dtype=dtype),
        torch.ones(8),
    )
    for weight, mean in ((vector, vector), (vector, None), (None, vector), (None, None)):
        has = weight is not None
        mean = None if mean is None else mean.clone()
        out = aten.native_batch_norm(x, weight, weight, mean, mean, True, 0.1, 1e-5)
        found["batch", has, mean is None] = out + aten.native_batch_norm_backward(
            x, x, weight, mean, mean, *out[1:], True, 1e-5, [True, has, has]
        )
        out = aten.native_group_norm(x, weight, weight, 4, 8, 6, 2, 1e-5)
        found["group", has] = out + aten.native_group_norm_backward(
            x, x, *out[1:], weight, 4, 8, 6, 2, [True, has, has]
        )
        out = aten.native_layer_norm(rows, [8], weight, weight, 1e-5)
        found["layer", has] = out + aten.native_layer_norm_backward(
            rows, rows, [8], *out[1:], weight, weight, [True, has, has]
        )
    return {key: [it if it is None else it.dtype for it in made] for key, made in found.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norms_of_other_types_than_their_parameters_keep_the_types_of_the_kernels(dtype):
    expected = mixed_norms(dtype)
    with FakeMode():
        assert mixed_norms(dtype) == expected


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("name", ["BatchNorm2d", "LayerNorm", "GroupNorm", "RMSNorm"])
def test_a_norm_under_autocast_that_was_planned_without(name):
    norm, size = NORMS[name]
    layer = nn.Linear(size[-1], size[-1])
    model = nn.Sequential(layer, norm, mlp(2, size[-1]))
    # In bfloat16 products take scratch, of other sizes on other processors.
    planned = plan(model, torch.randn(size), "200%", backend="graph", **SETTINGS)
    x, found = torch.randn(size), []
    for step in (model, planned):
        step.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(x).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(it.grad for it in model.parameters() if it.requires_grad)])
    assert all(torch.equal(*it) for it in zip(*found, strict=True))
    assert [it.how for it in planned.sn_memory.kinds] == ["planned", "nothing runs again"]


def test_views_of_one_item_have_the_strides_of_the_kernel():
    forms = [((1, 8, 6), (48, 1, 8)), ((8, 1, 6), (6, 1, 1)), ((4, 1), (1, 9)), ((1, 1), (5, 7))]
    forms += [((2, 1, 3, 1), (3, 7, 1, 11)), ((1,), (4,))]
    for size, stride in forms:
        shapes = [size, (1, *size), (*size, 1), tuple(it for it in size if it != 1)]
        for shape in shapes:
            expected = torch.empty_strided(size, stride).view(shape)
            with FakeMode():
                found = torch.empty_strided(size, stride).view(shape)
            assert (found.shape, found.stride()) == (expected.shape, expected.stride()), size


@pytest.mark.parametrize("loss", ["mse_loss", "huber_loss", "smooth_l1_loss"])
def test_gradients_of_losses_are_laid_out_as_the_kernel_has_them(loss):
    call = getattr(torch.ops.aten, f"{loss}_backward").default
    more = () if loss == "mse_loss" else (1.0,)
    for gradient in (torch.ones(()), torch.ones(4, 6, 8).transpose(1, 2)):
        x = torch.randn(4, 6, 8).transpose(1, 2)
        expected = call(gradient, x, x, 1, *more)
        with FakeMode() as mode:
            fake = [mode.from_tensor(it) for it in (gradient, x)]
            found = call(fake[0], fake[1], fake[1], 1, *more)
        assert found.stride() == expected.stride()


class Filter(nn.Module):
    """A filter of frequencies, as Fourier operators have it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, dtype=torch.cfloat))

    def forward(self, x):
        return x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, n=6, dim=1)


def test_complex_gradients_in_place_are_to_the_bit():
    """Products of complex numbers round by the order in which a kernel walks through them."""
    torch.manual_seed(0)
    model = nn.Sequential(Filter(), nn.GELU(), Filter())
    x = torch.randn(64, 6, 8, requires_grad=True)
    planned = plan(model, x, "100%", backend="graph", **SETTINGS)
    found = []
    for step in (model, planned):
        step.zero_grad()
        x.grad = None
        step(x).square().mean().backward()
        found.append([x.grad, *(it.grad for it in model.parameters())])
    assert all(torch.equal(*it) for it in zip(*found, strict=True))


class Pooled(nn.Module):
    """The most of three neighbours among tokens, before a product that goes by its layout."""

    def __init__(self, before=None):
        super().__init__()
        self.before, self.after = before, nn.Linear(8, 8)

    def forward(self, x):
        x = x if self.before is None else self.before(x)
        pooled = nn.functional.max_pool1d(x.transpose(1, 2), 3, 1, 1)
        return self.after(pooled.transpose(1, 2))


@pytest.mark.parametrize(
    ("before", "batch"),
    [(None, 1), (nn.Linear(8, 8).requires_grad_(False), 1), (nn.Linear(8, 8), 1), (None, 16)],
    ids=str,
)
def test_max_pool1d_has_the_layout_of_the_kernel_that_nothing_sees(before, batch):
    """Where the input needs no gradient; with one in the batch the product rounded otherwise."""
    sample = torch.randn(batch, 6, 8)
    model = Pooled(copy.deepcopy(before))
    expected = model(sample)
    expected.square().mean().backward()
    gradients = [it.grad for it in model.parameters()]
    model.zero_grad()
    planned = plan(model, sample, "100%", backend="graph", **SETTINGS)
    found = planned(sample)
    found.square().mean().backward()
    assert torch.equal(found, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        same = parameter.grad is gradient or torch.equal(parameter.grad, gradient)
        assert same
    assert verify(planned, sample).equal
