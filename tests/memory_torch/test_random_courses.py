"""Models that run other modules from step to step, by random numbers: planned for the largest."""

import random

import numpy as np
import pytest
import torch
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
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)
        )
        self.stem = nn.Linear(64, 64)
        self.draws = draws
        self.generator = np.random.default_rng(0)
        self.torch_generator = torch.Generator()

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if DRAWS[self.draws](self) < 0.6:
                x = x + block(x)
        return x.square().mean()


class Looks(nn.Module):
    """Looks at a value and draws, but always runs the same."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64))

    def forward(self, x):
        return self.inner(x).sum() if x.mean().item() < 100 else x.sum()


def peak_of(model, x):
    model.zero_grad()
    with StorageTracker([*model.parameters(), x]) as tracker:
        model(x).backward()
    return tracker.peak_bytes


@pytest.mark.parametrize("draws", DRAWS)
def test_steps_after_planning_keep_the_budget(draws):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model, x = Drops(draws), torch.randn(256, 64)
    with pytest.warns(match="depends on random numbers.*largest of 32 steps"):
        planned = plan(model, x, "80%", backend="modules")
    found = planned.sn_memory.plan
    assert found.courses == 32
    assert "largest of 32" in repr(found)
    if draws not in ("torch", "its own"):
        return
    # All six blocks run in one step of twenty.
    peaks = [peak_of(planned, x) for _ in range(40)]
    within = [it for it in peaks if it <= planned.sn_memory.budget_bytes]
    assert len(within) >= 36
    assert max(peaks) <= 1.2 * planned.sn_memory.budget_bytes
    assert max(peak_of(model, x) for _ in range(12)) > min(peaks)


def test_a_course_that_does_not_change_is_measured_once():
    model, x = Looks(), torch.randn(256, 64)
    planned = plan(model, x, "100%", backend="modules")
    assert planned.sn_memory.plan.courses == 1


def test_random_numbers_are_as_before():
    model, x = Drops("torch"), torch.randn(256, 64)
    own, states = model.torch_generator.get_state(), (torch.get_rng_state(), random.getstate())
    with pytest.warns(match="largest of 32 steps"):
        plan(model, x, "80%", backend="modules")
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(own, model.torch_generator.get_state())
