"""Norms and softmax of compressed activations: rows of far apart sizes do not share an error."""

import pytest
import torch
from small_models import module_of
from steps import gradients, off
from torch import nn
from torch.nn import functional

from sn_memory.torch import compress_activations


def scaled(norm):
    """A norm of what an op of the model made: its own input is the user's and left alone."""
    return module_of(lambda self, x: self.norm(x * 1.0), norm=norm)


def along(direction):
    """A loss whose gradient at the result is the direction."""
    return lambda model, x: (model(x).flatten() * direction.flatten()).sum()


NORMS = {
    "layer": lambda: nn.LayerNorm(48),
    "layer, not affine": lambda: nn.LayerNorm(48, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(48),
    "softmax": lambda: nn.Softmax(-1),
    "batch": lambda: nn.BatchNorm2d(48),
    "batch, evaluating": lambda: nn.BatchNorm2d(48).eval(),
    "group": lambda: nn.GroupNorm(12, 48),
    "instance": lambda: nn.InstanceNorm2d(48, affine=True),
}
OF_TOKENS = ("layer", "layer, not affine", "rms", "softmax")


@pytest.mark.parametrize(("last", "weight", "dtype"), [
    (False, 1.0, torch.float32), (False, 1e-6, torch.bfloat16), (True, 1e-6, torch.float32),
    (True, 1.0, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("kind", NORMS)
def test_each_row_of_a_norm_has_an_error_of_its_own_size(kind, last, weight, dtype):
    """Rows a thousandth as large as those beside them, with weights near zero as well.

    An element is off by less than its row's range over 255, by half of that in deviation at most.
    The range of 392 normal numbers is some six deviations, so a normalized element is off by 0.012,
    to which bfloat16 adds 0.002 of its size, and gradients by some such parts.
    """
    norm, tokens = NORMS[kind](), kind in OF_TOKENS
    # Groups of a group norm have four channels, which are of one size. Four rows of tokens would
    # fill six groups of 256 elements, so each is of another size than the one before it or after.
    scale = torch.where(torch.arange(48) // (1 if tokens else 4) % 3 == 0, 1.0, 1e-3)
    x = torch.randn(48, 8, 48) if tokens else torch.randn(8, 48, 7, 7)
    x *= scale[:, None, None]
    if kind != "softmax" and dtype == torch.float32:  # far from zero, seen from their spread
        x += 5 * scale[:, None, None]
    if last and not tokens:
        x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.mul_(weight)
    x, model = x.to(dtype).requires_grad_(), scaled(norm.to(dtype))
    settings = {
        "wanted": [x, *norm.parameters()][:2],
        "loss": along(torch.randn(x.shape).to(dtype)),
    }
    plain = gradients(model, x, **settings)
    with compress_activations(model, bits=8) as compressed:
        # In the second step a norm of several ops runs again.
        both = [gradients(model, x, **settings) for _ in range(2)]
        assert compressed.saved.ratio > 1.5
    axis = 0 if tokens else 1
    for own in both:
        for row in torch.nonzero(scale < 1)[:, 0]:
            assert off([own[0].select(axis, row)], [plain[0].select(axis, row)]) < 0.03
        assert off(own[1:], plain[1:]) < 0.03


NORMALIZE = {
    "by name": lambda self, x: functional.normalize(x * 1.0, dim=-1),
    "by place": lambda self, x: functional.normalize(x * 1.0, 2.0, -1),
    "over two axes": lambda self, x: functional.normalize(x.view(64, 6, 8) * 1.0, dim=(1, 2)),
    "one vector": lambda self, x: functional.normalize(x.flatten() * 1.0, dim=0),
    "softmax by name": lambda self, x: functional.softmax(x * 1.0, dim=-1),
    "softmax by place": lambda self, x: functional.softmax(x * 1.0, -1),
}


@pytest.mark.parametrize("how", NORMALIZE)
def test_axes_are_those_that_are_given(how):
    x, direction = torch.randn(64, 48), torch.randn(64 * 48)
    if how not in ("one vector", "softmax by name", "softmax by place"):
        x[::3] *= 1e-3
    model, settings = module_of(NORMALIZE[how]), {"wanted": [x], "loss": along(direction)}
    x.requires_grad_()
    (plain,) = gradients(model, x, **settings)
    with compress_activations(model, bits=8) as compressed:
        (own,) = gradients(model, x, **settings)
    assert compressed.saved.ratio > 1.5
    assert off([own[::3], own[1::3]], [plain[::3], plain[1::3]]) < 0.03


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-42, 0.0])
def test_a_row_of_odd_values_harms_no_other(value):
    """NaN, Inf, sizes near float32's ends and rows of one value: as without compression."""
    model, x = scaled(nn.LayerNorm(48)), torch.randn(128, 48)
    x[5], x[7, ::2] = value, value
    x.requires_grad_()

    def loss(model, x):
        return model(x).square().mul(torch.arange(48.0)).sum()

    (plain,) = gradients(model, x, wanted=[x], loss=loss)
    with compress_activations(model, bits=8):
        (own,) = gradients(model, x, wanted=[x], loss=loss)
    ordinary = torch.tensor([row for row in range(128) if row not in (5, 7)])
    assert off([own[ordinary]], [plain[ordinary]]) < 0.03
    assert torch.equal(own.isfinite(), plain.isfinite())


def test_inputs_of_norms_and_linear_layers_alike_have_the_predicted_variance():
    """A tensor that a norm reads first and a linear layer after: one form of it is kept."""

    def forward(self, x):
        x = x * 1.0
        # Sums save nothing, so that what arrives at the linear layer has no error.
        return self.norm(x).sum() + self.linear(x).sum()

    model = module_of(forward, norm=nn.LayerNorm(48), linear=nn.Linear(48, 16))
    x = torch.randn(256, 48)
    with compress_activations(model, bits=8, every=1) as compressed:
        model(x).backward()
        compressed.refresh()
        compressed.measure(lambda: model(x), repeats=40)
        row = next(row for row in compressed.controller.rows() if "linear" in row.key)
        assert row.measured_sd == pytest.approx(row.predicted_sd(), rel=0.2)
        assert compressed.controller.total_bytes == compressed.saved.compressed_bytes


@pytest.mark.parametrize(("kind", "bits"), [("layer", 2), ("batch", 4), ("group", 2)])
def test_few_bits_bias_no_gradient_of_a_norm(kind, bits):
    """The mean of many errors is as small as errors without a bias leave it.

    What flows back is off by an element's error over the root of its row's length, as it is the
    mean over the row of gradient times error that is wrong: at 4 bits by 0.2 / sqrt(192).
    """
    norm, repeats = NORMS[kind](), 100
    x = torch.randn(48, 8, 48) if kind == "layer" else torch.randn(8, 48, 7, 7)
    model, x = scaled(norm), x.requires_grad_()
    settings = {"wanted": [x, norm.weight], "loss": along(torch.randn(x.shape))}
    plain = gradients(model, x, **settings)
    with compress_activations(model, bits=bits):
        found = [gradients(model, x, seed=repeat, **settings) for repeat in range(repeats)]
    for number, exact in enumerate(plain):
        errors = torch.stack([each[number] - exact for each in found])
        # The mean's squares are a chi-square of many numbers: near one repeats-th of the errors'.
        ratio = float(errors.mean(0).square().sum() / errors.square().sum() * repeats**2)
        # Five deviations of the chi-square of 48 weights; of an input's many numbers it is narrow.
        assert 0.5 < ratio < 1.5 if number == 0 else 0 < ratio < 2.1
        size = float((errors.square().sum() / repeats).sqrt() / exact.norm())
        assert size < (0.05 if number == 0 else 0.5) * (8 if bits == 2 else 1)
