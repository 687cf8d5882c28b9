"""What kernels return and fake tensors do not show: gradients left out, layouts of convolutions."""

import copy

import pytest
import torch
from small_models import mlp, module_of, same_gradients
from steps import gradients, same, step_of
from torch import nn

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


def planned_to_the_bit(model, sample):
    planned = plan(model, sample, "90%", **SETTINGS)
    assert planned.sn_memory.backend == "graph"
    found = verify(planned, sample)
    assert found.equal
    assert found.measured_peak_bytes <= found.predicted_peak_bytes


@pytest.mark.parametrize(
    ("name", "before"), [(it, ("nothing", "a frozen part")[at % 2]) for at, it in enumerate(NORMS)]
)
def test_a_norm_whose_input_needs_no_gradient(name, before):
    norm, size = NORMS[name]
    frozen = [] if before == "nothing" else [nn.Linear(size[-1], size[-1]).requires_grad_(False)]
    planned_to_the_bit(nn.Sequential(*frozen, norm, mlp(3, size[-1])), torch.randn(size))


@pytest.mark.parametrize(("layer", "size"), [
    (nn.Conv1d(32, 5, 1), (64,)), (nn.Conv2d(32, 5, 1), (8, 8)),
    (nn.Conv2d(32, 5, 1, bias=False), (8, 8)), (nn.Conv2d(32, 32, 3, padding=1, groups=32), (8, 8)),
    (nn.ConvTranspose2d(32, 5, 2, stride=2), (8, 8)), (nn.Conv3d(32, 5, 1), (4, 4, 4)),
], ids=str)  # fmt: skip
def test_convolutions_fed_from_tokens(layer, size):
    """A convolution on an image made of tokens: its channels are the last axis in memory."""

    def forward(self, x):
        return self.layer(self.tokens(x).transpose(1, 2).reshape(len(x), 32, *size))

    planned_to_the_bit(module_of(forward, tokens=mlp(2), layer=layer), torch.randn(4, 64, 32))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["BatchNorm2d", "LayerNorm", "GroupNorm", "RMSNorm"])
def test_a_norm_under_autocast_that_was_planned_without(name, dtype):
    """Where what arrives is of another type than parameters, kernels return some of either."""
    norm, size = NORMS[name]
    layer = nn.Linear(size[-1], size[-1])
    model = nn.Sequential(layer, norm, mlp(2, size[-1]))
    # In half types products take scratch, of other sizes on other processors.
    planned = plan(model, torch.randn(size), "200%", backend="graph", **SETTINGS)
    with torch.autocast("cpu", dtype):
        same_gradients(
            planned, model, torch.randn(size), loss_of=lambda y: y.float().square().mean()
        )
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


def test_complex_gradients_in_place_are_to_the_bit():
    """Products of complex numbers round by the order in which a kernel walks through them."""

    def forward(self, x):
        """A filter of frequencies, as Fourier operators have it."""
        filtered = torch.fft.rfft(x, dim=1) * self.weight
        return x + torch.fft.irfft(filtered, n=6, dim=1)

    weights = [nn.Parameter(it) for it in torch.randn(2, 4, 8, dtype=torch.cfloat)]
    first, last = (module_of(forward, weight=it) for it in weights)
    model, x = nn.Sequential(first, nn.GELU(), last), torch.randn(64, 6, 8).requires_grad_()
    planned = plan(model, x, "100%", backend="graph", **SETTINGS)
    assert same(*(gradients(it, x, wanted=[x, *weights]) for it in (model, planned)))


@pytest.mark.parametrize(
    ("before", "batch"),
    [(None, 1), (nn.Linear(8, 8).requires_grad_(False), 1), (nn.Linear(8, 8), 1), (None, 16)],
    ids=str,
)
def test_max_pool1d_has_the_layout_of_the_kernel_that_nothing_sees(before, batch):
    """Where the input needs no gradient; with one in the batch the product rounded otherwise."""

    def forward(self, x):
        x = self.before(x)
        pooled = nn.functional.max_pool1d(x.transpose(1, 2), 3, 1, 1)
        return self.after(pooled.transpose(1, 2))

    before = copy.deepcopy(before) or nn.Identity()
    model = module_of(forward, before=before, after=nn.Linear(8, 8))
    sample = torch.randn(batch, 6, 8)
    planned = plan(model, sample, "100%", backend="graph", **SETTINGS)
    assert same(step_of(planned, sample), step_of(model, sample))
    assert verify(planned, sample).equal
