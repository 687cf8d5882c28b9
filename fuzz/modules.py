"""Small torch modules by name, and networks of them: what `programs.py` and `ranks.py` draw from.

Every layer maps a batch of rows (batch, LENGTH, WIDTH) to one of the same shape, so that any row of
names is a network. The weights of a layer depend on its own number alone: a network with a layer
left out has the other layers as they were.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8
LENGTH = 6

LAYERS: dict[str, Callable[[], nn.Module]] = {}


def layer(make: Any) -> Any:
    """Register a class, or a function that makes a module, by its name."""
    LAYERS[make.__name__] = make
    return make


class Call(nn.Module):
    """A function of the input and of a linear layer's result."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.linear(x))


def call(function: Callable[..., torch.Tensor]) -> None:
    """Register a function of an input and of a linear layer's result as a layer."""
    LAYERS[function.__name__] = functools.partial(Call, function)


for _act in (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.Softplus, nn.Hardswish, nn.Mish, nn.RReLU,
    nn.PReLU, nn.LogSigmoid, nn.SELU,
):  # fmt: skip
    LAYERS[_act.__name__] = functools.partial(
        lambda act: nn.Sequential(nn.Linear(WIDTH, WIDTH), act()), _act
    )
for _act in (nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardtanh, nn.RReLU, nn.ELU):
    LAYERS[f"{_act.__name__}_in_place"] = functools.partial(
        lambda act: nn.Sequential(nn.Linear(WIDTH, WIDTH), act(inplace=True)), _act
    )
for _norm in (nn.LayerNorm, nn.RMSNorm):
    LAYERS[_norm.__name__] = functools.partial(lambda norm: norm(WIDTH), _norm)
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    LAYERS[_kind.__name__] = functools.partial(lambda kind: Recurrent(kind), _kind)
    LAYERS[f"{_kind.__name__}_two"] = functools.partial(
        lambda kind: Recurrent(kind, num_layers=2, dropout=0.2), _kind
    )


class Recurrent(nn.Module):
    """A recurrent net, in both directions if it has two layers."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        both = settings.get("num_layers", 1) > 1
        self.net = kind(
            WIDTH, WIDTH // 2 if both else WIDTH, batch_first=True, bidirectional=both, **settings
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


class Turned(nn.Module):
    """A module that wants channels before the length."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


LAYERS["batch_norm"] = lambda: Turned(nn.BatchNorm1d(WIDTH))
LAYERS["batch_norm_cumulative"] = lambda: Turned(nn.BatchNorm1d(WIDTH, momentum=None))
LAYERS["instance_norm"] = lambda: Turned(nn.InstanceNorm1d(WIDTH, affine=True))
LAYERS["instance_norm_tracked"] = lambda: Turned(nn.InstanceNorm1d(WIDTH, track_running_stats=True))
LAYERS["group_norm"] = lambda: Turned(nn.GroupNorm(2, WIDTH))
LAYERS["convolution"] = lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
LAYERS["depthwise"] = lambda: Turned(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH))
LAYERS["transposed_convolution"] = lambda: Turned(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1))
LAYERS["pool"] = lambda: Turned(nn.AvgPool1d(3, 1, 1))
# torch takes another kernel where the input needs no gradient and no mode sees ops.
LAYERS["max_pool"] = lambda: Turned(nn.MaxPool1d(3, 1, 1))
LAYERS["dropout"] = lambda: nn.Dropout(0.3)
LAYERS["dropout_in_place"] = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3, True))
LAYERS["alpha_dropout"] = lambda: nn.AlphaDropout(0.2)
LAYERS["weight_norm_old"] = lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
LAYERS["weight_norm"] = lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
LAYERS["spectral_norm_old"] = lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
LAYERS["spectral_norm"] = lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
LAYERS["orthogonal"] = lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
LAYERS["encoder"] = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)


@call
def gated(x, h):
    return x * torch.sigmoid(h)


@call
def in_place_on_result(x, h):
    return h.mul_(0.5).add_(x)


@call
def in_place_on_view(x, h):
    h[..., : WIDTH // 2] += x[..., WIDTH // 2 :]
    return h


@call
def in_place_on_slice_of_clone(x, h):
    kept = x.clone()
    kept[:, ::2] *= 2
    kept[:, 1] = h[:, 0]
    return kept + h


@call
def chunks(x, h):
    first, second = h.chunk(2, -1)
    return torch.cat([second * first, first], -1) + x


@call
def unbound(x, h):
    return torch.stack([part * (at + 1) for at, part in enumerate(h.unbind(1))], 1)


@call
def expanded(x, h):
    return x + h.mean(1, keepdim=True).expand_as(x)


@call
def flipped(x, h):
    return h.flip(1) + x.roll(1, 1)


@call
def strided(x, h):
    return x + torch.as_strided(h.contiguous(), h.shape, h.contiguous().stride())


@call
def diagonal(x, h):
    scores = x @ h.transpose(1, 2)
    return x + scores.diagonal(dim1=1, dim2=2)[..., None]


@call
def reshaped(x, h):
    return (h.reshape(-1, 2, WIDTH // 2).transpose(1, 2).reshape(x.shape) + x).contiguous()


@call
def attention(x, h):
    return x + F.scaled_dot_product_attention(h, x, h, dropout_p=0.0)


@call
def attention_dropped(x, h):
    return x + F.scaled_dot_product_attention(h, x, h, dropout_p=0.2)


@call
def softmaxed(x, h):
    return x + h.log_softmax(-1).exp()


@call
def indexed(x, h):
    order = x.detach()[:, :, 0].argsort(1)
    return h.gather(1, order[..., None].expand_as(h)) + x


@call
def scattered(x, h):
    at = torch.arange(x.shape[1]) // 2
    return x.index_add(1, at, h)


@call
def masked(x, h):
    return torch.where(x > 0, h, x).masked_fill(h > 2, 1.0)


@call
def detached(x, h):
    return x + h - h.detach() * 0.5


@call
def without_gradients(x, h):
    with torch.no_grad():
        scale = h.abs().amax() + 1
    return x + h / scale


@call
def doubled(x, h):
    return (h.double().exp().clamp(max=9.0) + x).to(x.dtype)


@call
def autocast_inside(x, h):
    with torch.autocast("cpu", torch.bfloat16):
        return x + (h @ h.transpose(1, 2) @ x).to(x.dtype)


@call
def noisy(x, h):
    return h + 0.1 * torch.randn_like(x)


@call
def drop_path(x, h):
    keep = torch.rand(x.shape[0], 1, 1) > 0.3
    return x + h * keep


@call
def by_value(x, h):
    return x + h if h.sum().item() > 0 else x - h


@call
def by_chance(x, h):
    return x + h if torch.rand(()).item() > 0.5 else x


@call
def checkpointed(x, h):
    return x + checkpoint(lambda value: F.gelu(value) * value, h, use_reentrant=False)


@call
def conjugated(x, h):
    value = torch.complex(x, h)
    return (value * value.conj()).real.sqrt().add(1e-3) + value.angle() * 0


@call
def spectrum(x, h):
    return torch.fft.irfft(torch.fft.rfft(h, dim=1) * 0.5, n=x.shape[1], dim=1) + x


@call
def hooked(x, h):
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 0.5)
    return x + h


@call
def cumulative(x, h):
    return x + h.cumsum(1) * 0.1


@call
def einsum(x, h):
    return x + torch.einsum("btc,bsc,bsd->btd", x, h, h) * 0.05


@call
def norm_by_hand(x, h):
    return x + h / h.norm(dim=-1, keepdim=True)


@call
def kept_list(x, h):
    parts = [x]
    for _ in range(3):
        parts.append(torch.tanh(parts[-1] + h))
    return sum(parts)


class Square(torch.autograd.Function):
    """A square with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


@call
def own_function(x, h):
    return x + Square.apply(h)


@layer
class ComplexWeight(nn.Module):
    """A filter of frequencies, as Fourier operators have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.cfloat))

    def forward(self, x):
        return x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, n=x.shape[1], dim=1)


@layer
class Shared(nn.Module):
    """One linear layer three times, the last time by its weight's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.linear(torch.tanh(self.linear(x)))
        return F.linear(h, self.linear.weight.t()) + x


@layer
class Tied(nn.Module):
    """Two modules that hold the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


@layer
class Scalar(nn.Module):
    """Parameters of one number, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale + self.scale


@layer
class FrozenPart(nn.Module):
    """Layers that do not train, with statistics that do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.norm = Turned(nn.BatchNorm1d(WIDTH))
        self.requires_grad_(False)

    def forward(self, x):
        return x + self.norm(self.net(x))


@layer
class Average(nn.Module):
    """A centre that follows the data, as a buffer written in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        h = F.silu(self.linear(x - self.centre))
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.steps += 1
        return h + x


@layer
class Replaced(nn.Module):
    """A buffer that is replaced by another in the forward pass, not written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        h = self.linear(x) * torch.sigmoid(self.last)
        self.last = h.detach().mean((0, 1))
        return h


@layer
class Momentum(nn.Module):
    """A slow copy of a layer that follows it in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(WIDTH, WIDTH)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.slow(x)
        return self.fast(x) - target


@layer
class Counted(nn.Module):
    """A number of Python that changes with each call, and is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return F.relu(self.linear(x))


@layer
class Block(nn.Module):
    """A residual block of modules within modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.net(self.norm(x))


@layer
class Attending(nn.Module):
    """Multi-head attention with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        return x + self.net(x, x, x, attn_mask=self.mask, need_weights=False)[0]


@layer
class Positions(nn.Module):
    """An embedding of positions, its maximum norm kept by the forward pass itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


class Net(nn.Module):
    """Layers in a row, and one of several forms of what comes out."""

    def __init__(self, names: tuple[str, ...], numbers: tuple[int, ...], form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for name, number in zip(names, numbers, strict=True):
            torch.manual_seed(number)
            self.layers.append(LAYERS[name]())
        torch.manual_seed(7)
        self.head = nn.Linear(WIDTH, 3)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        for inner in self.layers:
            x = inner(x)
        out = self.head(x)
        if self.form == "loss":
            return out.square().mean()
        if self.form == "pair":
            return out, x.mean(1)
        if self.form == "view":
            return out[:, 0]
        if self.form == "mapping":
            return {"out": out, "hidden": x, "none": None}
        return out


def loss_of(outputs: Any) -> torch.Tensor:
    """Return a scalar that every tensor of an output but `hidden` is in."""
    if isinstance(outputs, dict):
        outputs = outputs["out"]
    if isinstance(outputs, tuple):
        return sum(output.square().mean() for output in outputs)
    return outputs if not outputs.dim() else outputs.square().mean()


def fewest_layers(program: Any, fails: Callable[[Any], bool]) -> Any:
    """Leave out the layers of a drawn program, a dataclass, without which it still fails."""
    at = 0
    while at < len(program.layers) and len(program.layers) > 1:
        kept = [place for place in range(len(program.layers)) if place != at]
        less = replace(
            program,
            layers=tuple(program.layers[place] for place in kept),
            numbers=tuple(program.numbers[place] for place in kept),
            frozen=tuple(kept.index(place) for place in program.frozen if place != at),
        )
        if fails(less):
            program = less
        else:
            at += 1
    return program
