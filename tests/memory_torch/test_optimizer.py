"""What an optimizer holds, where its step does not run on tensors without values as well."""

import pytest
import torch
from small_models import mlp
from torch import nn

from sn_memory.base.errors import PlanWarning
from sn_memory.torch import estimate, plan

SAMPLE = torch.zeros(4, 32)


def adafactor(**settings):
    def make(weights):
        return pytest.importorskip("transformers.optimization").Adafactor(weights, **settings)

    return make


KINDS = {
    "torch's Adafactor": torch.optim.Adafactor,
    "Adafactor": adafactor(),
    "Adafactor with a rate": adafactor(relative_step=False, lr=0.1, beta1=0.9),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


def held_by(optimizer):
    values = [it for state in optimizer.state.values() for it in state.values()]
    return sum(it.nbytes for it in values if isinstance(it, torch.Tensor))


def stepped(model, optimizer):
    model(SAMPLE).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_optimizer_that_looks_at_values(kind):
    model = mlp(2)
    found = estimate(model, SAMPLE, optimizer=kind(model.parameters()))
    assert found.optimizer_bytes == held_by(stepped(model, kind(model.parameters()))) > 0


def test_a_plan_counts_it_too():
    model = mlp(4)
    optimizer = torch.optim.Adafactor(model.parameters())
    with_it = plan(model, SAMPLE, "100%", profile=False, optimizer=optimizer).sn_memory.plan
    without = plan(model, SAMPLE, "100%", profile=False).sn_memory.plan
    state = estimate(model, SAMPLE, optimizer=optimizer).optimizer_bytes
    assert with_it.peak_bytes == without.peak_bytes + state


class Selects(torch.optim.SGD):
    """Its step looks for places, and how many there are depends on values."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight[weight.grad > 0].clone()
        super().step()


class Greedy(torch.optim.SGD):
    """Takes what no twin has."""

    def __init__(self, params, model):
        super().__init__(params, lr=0.1, momentum=0.9)


KINDS_THAT_FAIL = {
    "selects": Selects,
    "closure": torch.optim.LBFGS,
    "settings": lambda weights: Greedy(weights, nn.Identity()),
}


@pytest.mark.parametrize("kind", KINDS_THAT_FAIL.values(), ids=KINDS_THAT_FAIL)
def test_a_step_that_cannot_be_told_is_said_with_its_reason(kind):
    model = mlp(2)
    with pytest.warns(PlanWarning, match="without values") as caught:
        found = estimate(model, SAMPLE, optimizer=kind(model.parameters()))
    assert len(caught) == 1
    assert found.optimizer_bytes == 0
    assert found.step_bytes == estimate(model, SAMPLE).step_bytes


def test_then_the_state_it_has_counts():
    model = mlp(2)
    optimizer = stepped(model, Selects(model.parameters()))
    with pytest.warns(PlanWarning, match="DynamicOutputShape"):
        found = estimate(model, SAMPLE, optimizer=optimizer)
    assert found.optimizer_bytes == held_by(optimizer) == found.parameters_bytes


class Endless(torch.optim.SGD):
    """Goes on until a value says so."""

    def step(self):
        while self.param_groups[0]["params"][0].abs().max().item() < 1e9:
            pass


def test_a_step_that_waits_for_a_value_ends():
    with pytest.warns(PlanWarning, match="again and again"):
        estimate(mlp(1), SAMPLE, optimizer=Endless)
