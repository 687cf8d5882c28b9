"""Parameters updated by a hook as their gradients complete, and the gradients let go at once.

Then no gradient is held to the end of the step, and the plan is not to count one.
"""

import copy

import pytest
import torch
from torch import nn

from sn_memory import BudgetError, PlanError
from sn_memory.torch import plan, trace, verify
from sn_memory.torch.model.tracker import AllocationTracker

SETTINGS = {"profile": False, "planner": "sqrt_n"}


def wide(layers=8, width=128):
    """Weights are larger than what passes through: gradients make the peak."""
    return nn.Sequential(
        *(it for _ in range(layers) for it in (nn.Linear(width, width), nn.GELU()))
    )


def normed(blocks=6, width=64):
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True))
            for _ in range(blocks)
        )
    )


class Twice(nn.Module):
    """A weight that is used in two places: its gradient is complete after the second only."""

    def __init__(self):
        super().__init__()
        self.shared, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.shared(torch.tanh(self.other(torch.tanh(self.shared(x)))))


NETS = {"wide": (wide, (4, 128)), "normed": (normed, (96, 64)), "twice": (Twice, (32, 64))}


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
    ("net", "budget"),
    [("wide", "100%"), ("normed", "100%"), ("normed", "80%"), ("twice", "100%")],
)
def test_trains_as_torch_does_at_the_predicted_peak(net, budget):
    make, shape = NETS[net]
    torch.manual_seed(0)
    model, sample = make(), torch.randn(shape)
    expected = updating(copy.deepcopy(model))
    mine = updating(copy.deepcopy(model))
    planned = plan(mine, sample, budget, state="hooks", **SETTINGS)
    step = planned.sn_memory.latest
    for _ in range(3):
        peak, out = trained(planned, sample, step.known)
        assert peak == step.plan.peak_bytes
        assert torch.equal(out, trained(expected, sample)[1])
    assert all(it.grad is None for it in planned.parameters())
    for ours, torchs in zip(
        planned.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, torchs)


def test_keeps_a_budget_that_has_no_room_for_all_gradients():
    model, sample = wide(), torch.randn(4, 128)
    held = sum(it.nbytes for it in model.parameters())
    budget = held + held // 2
    with pytest.raises(BudgetError):
        plan(model, sample, budget, **SETTINGS)
    planned = plan(updating(model), sample, budget, state="hooks", **SETTINGS)
    step = planned.sn_memory.latest
    assert trained(planned, sample, step.known)[0] == step.plan.peak_bytes <= budget


def test_an_update_is_an_op_that_writes_its_parameter():
    graph = trace(wide(2), torch.randn(4, 128), profile=False, update="hooks").graph
    updates = [op for op in graph.ops if op.kind == "add_" and "0.weight" in op.writes]
    (update,) = updates
    later = graph.ops[graph.op_index[update.name] + 1 :]
    assert not any("0.weight" in op.inputs for op in later)
    (gradient,) = set(update.inputs) - {"0.weight"}
    assert not next(it for it in graph.storages if it.name == gradient).keep


@pytest.mark.parametrize("backend", ["compile", "modules"])
def test_says_with_what_it_does_not_go(backend):
    settings = {"profile": False, "backend": backend}
    with pytest.raises(ValueError, match="state='hooks' with"):
        plan(wide(2), torch.randn(4, 128), "100%", state="hooks", **settings)


def test_verify_says_that_no_hook_runs_in_it():
    sample = torch.randn(4, 128)
    planned = plan(wide(2), sample, "100%", state="hooks", **SETTINGS)
    with pytest.raises(PlanError, match="state='hooks'"):
        verify(planned, sample)
