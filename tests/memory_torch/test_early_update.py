"""Parameters updated by a hook as their gradients complete, and the gradients let go at once.

Then no gradient is held to the end of the step, and the plan is not to count one.
"""

import copy

import pytest
import torch
from small_models import wide
from steps import grads, same
from torch import nn

from sn_memory import BudgetError, PlanError
from sn_memory.torch import plan, verify
from sn_memory.torch.model.tracker import AllocationTracker

SETTINGS = {"profile": False, "planner": "sqrt_n"}
SAMPLE = torch.randn(4, 128)


def normed(blocks=6, width=64):
    layers = nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True)
    return nn.Sequential(*(copy.deepcopy(it) for _ in range(blocks) for it in layers))


def twice():
    """A weight that is used in two places: its gradient is complete after the second only."""
    shared, other = nn.Linear(64, 64), nn.Linear(64, 64)
    return nn.Sequential(shared, nn.Tanh(), other, nn.Tanh(), shared)


def updating(model, rate=0.1):
    """Update each parameter when its gradient is complete; the gradient is then gone."""

    def update(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-rate)
        parameter.grad = None

    for it in model.parameters():
        it.register_post_accumulate_grad_hook(update)
    return model


def trained(model, sample, known=()):
    """The peak of a step, and its output."""
    there = [*model.parameters(), *model.buffers(), sample, *known]
    tracker = AllocationTracker(there, kernels=True)
    with tracker:
        out = model(sample)
    output_gradient = torch.ones_like(out)
    tracker.meet(output_gradient)
    with tracker:
        out.backward(output_gradient)
    return tracker.peak_bytes, out.detach().clone()


@pytest.mark.parametrize(
    ("make", "shape", "budget"),
    [(wide, (4, 128), "100%"), (normed, (96, 64), "80%"), (twice, (32, 64), "100%")],
)
def test_trains_as_torch_does_at_the_predicted_peak(make, shape, budget):
    sample = torch.randn(shape)
    model = make()
    expected, mine = (updating(copy.deepcopy(model)) for _ in range(2))
    planned = plan(mine, sample, budget, state="hooks", **SETTINGS)
    step = planned.sn_memory.latest
    for _ in range(3):
        peak, out = trained(planned, sample, step.known)
        assert peak == step.plan.peak_bytes
        assert torch.equal(out, trained(expected, sample)[1])
    assert grads(planned) == [None] * len(grads(planned))
    assert same(planned.state_dict().values(), expected.state_dict().values())


def test_keeps_a_budget_that_has_no_room_for_all_gradients():
    model = wide(8)
    held = sum(it.nbytes for it in model.parameters())
    budget = held + held // 2
    with pytest.raises(BudgetError):
        plan(model, SAMPLE, budget, **SETTINGS)
    planned = plan(updating(model), SAMPLE, budget, state="hooks", **SETTINGS)
    step = planned.sn_memory.latest
    assert trained(planned, SAMPLE, step.known)[0] == step.plan.peak_bytes <= budget


def test_says_with_what_it_does_not_go():
    for backend in ("compile", "modules"):
        with pytest.raises(ValueError, match="state='hooks' with"):
            plan(wide(2), SAMPLE, "100%", state="hooks", profile=False, backend=backend)
    # No hook runs in it.
    with pytest.raises(PlanError, match="state='hooks'"):
        verify(plan(wide(2), SAMPLE, "100%", state="hooks", **SETTINGS), SAMPLE)
