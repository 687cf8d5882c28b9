"""Gradients of outputs that come in another layout than the step was planned with."""

import copy

import pytest
import steps
import torch
from steps import mean_of_squares, same, step_of
from torch import nn

from sn_memory.base.errors import PlanWarning
from sn_memory.torch import plan


class Maps(nn.Module):
    """Returns a map in channels_last, or contiguous."""

    def __init__(self, contiguous):
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(4)]
        self.layers, self.contiguous = nn.Sequential(*layers), contiguous

    def forward(self, x):
        x = self.layers(x)
        return x.contiguous() if self.contiguous else x


def planned(contiguous, backend):
    model = Maps(contiguous).to(memory_format=torch.channels_last)
    sample = torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last)
    settings = {"backend": backend, "profile": False, "time_limit_s": 2.0}
    return model, plan(copy.deepcopy(model), sample, "100%", **settings), sample


@pytest.mark.parametrize("backend", ["graph", "compile"])
def test_another_layout_is_said_once(backend):
    model, ours, sample = planned(False, backend)
    with pytest.warns(PlanWarning, match=r"has strides \(2048, 256, 16, 1\)") as warned:
        found = step_of(ours, sample)
    assert [it.filename for it in warned] == [steps.__file__]
    step_of(ours, sample)
    for mine, its in zip(found, step_of(model, sample), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("backend", ["graph", "modules", "compile"])
@pytest.mark.parametrize(
    ("contiguous", "loss_of"),
    [(True, mean_of_squares), (False, torch.sum), (False, lambda out: out.square().sum())],
    ids=["the advice", "one number", "the same layout"],
)
def test_without_a_word_the_bits_are_equal(backend, contiguous, loss_of):
    model, ours, sample = planned(contiguous, backend)
    assert same(*(step_of(it, sample, loss_of=loss_of) for it in (ours, model)))
