"""Models whose control flow depends on values, planned by regions, and steps that are watched."""

import random
import warnings

import steps
import torch
from steps import grads
from torch import nn

from sn_memory.torch import plan
from sn_memory.torch.model.tracker import AllocationTracker

WIDTH, ROWS = 32, 256


def rows(seed=0, many=ROWS):
    return steps.rows(many, seed, WIDTH)


def images(seed=0):
    return torch.randn(2, 4, 24, 24, generator=torch.Generator().manual_seed(seed))


def planned(net, sample, budget, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(net, sample, budget, profile=False, time_limit_s=6.0, **settings)


def twins(kind, budget="70%", sample=None, backends=("regions",), **settings):
    """Return a net, and another of the same weights that is planned, by one of these back ends."""
    net, twin = (torch.manual_seed(0) and kind() for _ in range(2))
    twin = planned(twin, rows() if sample is None else sample, budget, **settings)
    assert twin.sn_memory.backend in backends
    return net, twin


def watched(net, *inputs, seed=0):
    """Return loss, gradients and buffers of a step, and its peak."""
    torch.manual_seed(seed)
    random.seed(seed)
    net.zero_grad()
    known = [*net.parameters(), *net.buffers(), *inputs]
    with AllocationTracker(known, kernels=True) as tracker:
        loss = net(*inputs)
        loss.backward()
    return [loss.detach(), *grads(net), *(it.clone() for it in net.buffers())], tracker.peak_bytes


def block(width=WIDTH):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


class Looks(nn.Module):
    """Looks at a value after each block."""

    def __init__(self, blocks=4, make=block, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))

    def states(self, x):
        """Give what comes after each block."""
        for it in self.blocks:
            x = x + it(x)
            yield x

    def forward(self, x):
        for state in self.states(x):
            if state.mean().item() > 1e6:
                break
        return state.square().mean()


class Drops(Looks):
    """Leaves blocks out by chance."""

    def forward(self, x):
        for it in self.blocks:
            if torch.rand(()).item() < 0.6:
                x = x + it(x)
        return x.square().mean()


class Experts(Looks):
    """Rows go to one of two experts."""

    def __init__(self):
        super().__init__(2, gate=nn.Linear(WIDTH, 2))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = x
        for number, expert in enumerate(self.blocks):
            at = (chosen == number).nonzero().squeeze(1)
            if at.numel():
                out = out.index_add(0, at, expert(x[at]))
        return out.square().mean() + self.gate(x).square().mean()


class Crosses(Looks):
    """Blocks that each read the same memory twice, with a break between them."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.inner = block()

        def forward(self, x, memory):
            return x + self.inner(x) + self.key(memory).tanh() * self.value(memory)

    def __init__(self):
        super().__init__(3, self.Reader, stem=nn.Linear(WIDTH, WIDTH))

    def states(self, x):
        memory = self.stem(x)
        for it in self.blocks:
            x = it(x, memory)
            yield x + memory.sum() * 1e-3


class Normed(Looks):
    """Convolutions with statistics and dropout; one block runs twice."""

    def __init__(self):
        super().__init__(3, self.block)

    def block(self):
        return nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
            nn.Conv2d(16, 4, 3, padding=1),
        )  # fmt: skip

    def states(self, x):
        for it in (*self.blocks, self.blocks[0]):
            x = x + it(x)
            yield x


class Masks(Looks):
    """Only the rows that a mask shows."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x, shown=None):
        x = x[x[:, 0] > 0 if shown is None else shown]
        for it in self.blocks:
            x = x + it(x)
        return x.square().mean()


class Images(Looks):
    """Layers on an image that lies with its channels first; what is alike gets gradients otherwise.

    As in DETR: an input that is a view and is read again after the layer, small norms between the
    layers, and a look after each.
    """

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, places):
            return self.out((self.key(x + places).softmax(1) * self.value(x)).tanh())

    def __init__(self):
        super().__init__(3)
        self.stem = nn.Conv2d(WIDTH, WIDTH, 1)
        self.mixers = nn.ModuleList(self.Mixer() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.register_buffer("places", torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH))

    def states(self, x):
        x = self.stem(x.view(-1, WIDTH, 8, 8)).flatten(2).transpose(1, 2)
        for mixer, norm, it in zip(self.mixers, self.norms, self.blocks, strict=True):
            x = norm(x + mixer(x, self.places))
            x = x + it(x)
            yield x.transpose(1, 2)


class Tied(Looks):
    """The first and the last layer are one weight, and so are two layers inside of blocks."""

    def __init__(self):
        super().__init__(3, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))
        self.last.weight = self.first.weight
        self.blocks[2][1].weight = self.blocks[0][1].weight

    def states(self, x):
        x = self.first(x)
        for it in self.blocks:
            x = x + it(x)
            yield x
        yield self.last(x)


class Buffered(Looks):
    """Blocks that read a buffer of the model, and count in one that they share."""

    class Counts(nn.Module):
        def __init__(self, steps):
            super().__init__()
            self.inner = block()
            self.register_buffer("steps", steps)

        def forward(self, x, scale):
            self.steps += 1
            return self.inner(x) * scale + self.steps

    def __init__(self):
        steps = torch.zeros(())
        super().__init__(3, lambda: self.Counts(steps), norm=nn.BatchNorm1d(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def states(self, x):
        for it in self.blocks:
            x = x + self.norm(it(x, self.scale))
            yield x


class Casts(Looks):
    """Some blocks run in another type than others, and two of them in both."""

    def states(self, x):
        for at, it in enumerate((*self.blocks, *self.blocks[:2])):
            with torch.autocast("cpu", torch.bfloat16, enabled=at % 2 == 0 or at == 5):
                y = it(x)
            x = x + y.float()
            yield x


class Views(Looks):
    """Blocks are given parts of one tensor, and what they return is written into another."""

    def states(self, x):
        out = x.clone()
        for at, it in enumerate(self.blocks):
            left, right = out.chunk(2)
            out = torch.cat((it(right), left * 0.5))
            out[at] += 1.0
            yield out
