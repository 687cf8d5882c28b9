"""Models that run other modules from step to step, by random numbers: planned for the largest."""

import random

import numpy as np
import pytest
import torch
from small_models import mlp, module_of
from torch import nn

from sn_memory.torch import StorageTracker, plan

DRAWS = {
    "torch": lambda self: torch.rand(()).item(),
    "Python": lambda self: random.random(),
    "NumPy": lambda self: np.random.rand(),  # noqa: NPY002
    "its own": lambda self: self.generator.random(),
    "its own, of torch": lambda self: torch.rand((), generator=self.torch_generator).item(),
}


class Drops(nn.Module):
    """Leaves blocks out by chance."""

    def __init__(self, draws):
        super().__init__()
        self.blocks, self.stem, self.draws = mlp(6, 64), nn.Linear(64, 64), draws
        self.generator, self.torch_generator = np.random.default_rng(0), torch.Generator()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if DRAWS[self.draws](self) < 0.6:
                x = x + block(x)
        return x.square().mean()


def peak_of(model, x):
    model.zero_grad()
    with StorageTracker([*model.parameters(), x]) as tracker:
        model(x).backward()
    return tracker.peak_bytes


def chance(model):
    """The states of all generators: planning leaves them as they were."""
    of_numpy = np.random.get_state()[1:3]  # noqa: NPY002
    states = [torch.get_rng_state(), model.torch_generator.get_state(), random.getstate()]
    return [*states, of_numpy[0].tobytes(), of_numpy[1], model.generator.bit_generator.state]


@pytest.mark.parametrize("draws", DRAWS)
def test_steps_after_planning_keep_the_budget(draws):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model, x = Drops(draws), torch.randn(256, 64)
    before = chance(model)
    with pytest.warns(match="depends on random numbers.*largest of 32 steps"):
        planned = plan(model, x, "80%", backend="modules")
    assert all(map(torch.equal, before[:2], chance(model)[:2]))
    assert before[2:] == chance(model)[2:]
    found = planned.sn_memory.plan
    assert found.runs == 32
    assert "largest of 32" in repr(found)
    if draws != "its own":
        return
    # All six blocks run in one step of twenty.
    peaks = [peak_of(planned, x) for _ in range(40)]
    within = [it for it in peaks if it <= planned.sn_memory.budget_bytes]
    assert len(within) >= 36
    assert max(peaks) <= 1.2 * planned.sn_memory.budget_bytes
    assert max(peak_of(model, x) for _ in range(12)) > min(peaks)


def test_a_path_that_does_not_change_is_measured_once():
    """It looks at a value and draws, but always runs the same."""

    def forward(self, x):
        return self.layers(x).sum() if x.mean().item() < 100 else x.sum()

    layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64))
    model = module_of(forward, layers=layers)
    planned = plan(model, torch.randn(256, 64), "100%", backend="modules")
    assert planned.sn_memory.plan.runs == 1
