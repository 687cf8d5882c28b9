"""Models that are small and awkward: in place, random, with statistics, several outputs."""

import torch
from torch import nn
from torch.nn.functional import dropout, max_pool2d, scaled_dot_product_attention


class Everything(nn.Module):
    """Convolutions, batch norm, ReLU in place, dropout, a skip, attention, a constant."""

    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.linear = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.scale = torch.linspace(0.5, 1.5, width)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv1(x)))
        x = x + torch.relu_(self.norm(self.conv2(dropout(x, 0.5, self.training))))
        x = max_pool2d(x, 2).flatten(2).transpose(1, 2)
        x = self.layer_norm(self.linear(x))
        y = scaled_dot_product_attention(x, x, x)
        return (x + y) * self.scale.to(x.device) * torch.tensor([2.0], device=x.device)


class SeveralOutputs(nn.Module):
    """A mapping with logits, a count that takes no gradient, and something that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, *, offset):
        h = torch.tanh(self.linear(x + offset))
        left, right = h.chunk(2, -1)
        return {"logits": left, "count": (right > 0).sum(), "rest": [right, 7]}


def mlp(layers=8, width=32):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )


def images(batch=4, size=16):
    return torch.randn(batch, 3, size, size)


def same_gradients(planned, model, *args, loss_of=lambda out: out.square().sum(), **kwargs):
    """A planned model, and the model it is of, give the same loss and gradients to the bit."""
    results = []
    for it in (planned, model):
        loss = loss_of(it(*args, **kwargs))
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *results))


def most_scratch(planned):
    """Return the most bytes that a kernel of the planned step takes for itself."""
    ops = planned.sn_memory.trace.graph.ops
    return max((it.bytes for op in ops for it in op.workspaces), default=0)


def module_of(forward, **parts):
    """Return a module of a class of its own, with a forward and parts by name."""
    module = type("Module", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def wide(layers=6, width=128):
    """Weights are larger than what passes through: gradients are most of the peak."""
    return nn.Sequential(
        *(it for _ in range(layers) for it in (nn.Linear(width, width), nn.GELU()))
    )


def maps_then_weights():
    """Large maps first, large weights last: gradients that one rank computes late."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)),
        *(nn.Flatten(), nn.Linear(8 * 8 * 8, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


class WithLoss(nn.Module):
    """Returns its loss; a parameter may be in no forward pass."""

    def __init__(self, unused=False):
        super().__init__()
        self.blocks = mlp(6)
        if unused:
            self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.blocks(x).square().mean()
