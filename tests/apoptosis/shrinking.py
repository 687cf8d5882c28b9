"""Torch models with channels of every kind, and what makes neurons of them alike."""

import torch
from torch import nn

from sn_memory.apoptosis.torch import Apoptosis

IMAGES = (16, 2, 8, 8)
# float32 sums of some hundred products, then a batch norm: a few hundred units in the last place.
ROUNDING = 2e-5


class Residual(nn.Module):
    """Two blocks around one stream of channels; the head reads pooled channels."""

    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = x + torch.relu(self.first(x))
        x = x + self.second(x)
        return self.head(x.mean((2, 3)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def chain(activation=None):
    activation = activation or nn.ReLU()
    return nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, 7), activation, nn.Linear(7, 3))


def convolutions(bias=False, norm=True):
    norms = [nn.BatchNorm2d(6)] if norm else []
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=bias), *norms, nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


def depthwise():
    return nn.Sequential(
        nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 4, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def duplicate(model, names, one=1, other=3):
    """Make row `other` of these tensors row `one`; by a name with ".", else of a whole module."""
    for name, value in model.state_dict().items():
        if name.startswith(tuple(names)) and value.dim():
            value[other] = value[one]


def train(model, optimizer, inputs, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()


def apoptosis(model, optimizer=None, **settings):
    """One that looks at each step; without an optimizer, weights stay as they are."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    defaults = {"tolerance": 1e-4, "every": 1, "min_width": 1, "round_to": 1, "overhead": None}
    return Apoptosis(model, optimizer, **{**defaults, "schedule": "aggressive", **settings})


def check_duplicates(model, inputs):
    """Neurons 1 and 3 become one, and nothing that the model puts out changes; the event."""
    model.train()
    shrink = apoptosis(model)
    before = model(inputs).detach()
    event = shrink.step()
    (merged,) = [one for one in event.merged if one.before - one.after == 1]
    assert len(event.merged) == 1
    assert set(merged.pairs[0]) == {1, 3}
    after = model(inputs)
    assert (after - before).abs().max() <= ROUNDING * before.abs().max()
    after.square().sum().backward()
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    return event


def check_it_stays(model, inputs, shrink, says=""):
    """Nothing merges, for a reason with these words, and nothing of the model changes."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    model(inputs)
    event = shrink.step()
    assert not event
    assert any(says in reason for reason in event.refused.values()), event.refused
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    return event


SLOW = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.0),
}


def trained(model, kind, inputs, steps):
    """The optimizer of a model and its last event, after as many steps of rate 0 as it looks at."""
    optimizer = SLOW[kind](model.parameters())
    shrink = apoptosis(model, optimizer, every=steps)
    for _ in range(steps):
        train(model, optimizer, inputs)
        event = shrink.step()
    return optimizer, event
