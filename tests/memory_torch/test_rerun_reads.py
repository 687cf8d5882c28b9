"""What a module reads when it runs again in the backward pass is what it read in the forward pass.

Or one error says what was changed in between.

Over 300 lines: one table of changes, and the models that read what changes.
"""

import copy

import pytest
import torch
from small_models import mlp
from steps import grads, rows, same
from torch import nn
from torch.nn import functional

from sn_memory.torch import PlanWarning, ReplayError, plan, verify

SAMPLE = rows(512)


class Block(nn.Module):
    """Reads a buffer and a bias that autograd does not save; has two modes."""

    def __init__(self):
        super().__init__()
        self.into, self.back = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.register_buffer("centre", torch.full((32,), 0.3))

    def forward(self, x):
        hidden = functional.gelu(self.into(functional.gelu(self.norm(x) + self.centre)))
        return x + self.drop(self.back(hidden))


def net(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def by_modules(model, budget="75%", **settings):
    planned = plan(model, SAMPLE, budget, backend="modules", profile=False, **settings)
    assert planned.sn_memory.plan.decided("recompute")
    return planned


def gradients(model, parameters=None, between=lambda model: None, run=None):
    """Run a step in which something is done between the passes; return all gradients."""
    torch.manual_seed(1)
    parameters = [*model.parameters()] if parameters is None else parameters
    loss = (run or model)(SAMPLE).square().mean()
    between(model)
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@torch.no_grad()
def centres(model):
    for it in model.modules():
        if isinstance(it, Block):
            it.centre.mul_(2)


@torch.no_grad()
def biases(model):
    for it in model.modules():
        if isinstance(it, Block):
            it.into.bias.mul_(2)


@pytest.mark.parametrize(("change", "what"), [(centres, "buffer centre"), (biases, "parameter")])
def test_a_change_in_place_is_an_error(change, what):
    """Gradients were 52 % and 21 % off, silently."""
    planned = by_modules(net())
    with pytest.raises(ReplayError, match=rf"{what}.*'\d', which runs again.*was changed after"):
        gradients(planned, between=change)


class GraphBinding(Block):
    def forward(self, x, *, shift):
        return super().forward(x + shift)


class Shifted(nn.Module):
    """Hands its blocks a tensor by name, which is changed when they have run."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(GraphBinding() for _ in range(4))
        self.shift = torch.zeros(32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, shift=self.shift)
        return x


def test_an_argument_by_name_that_is_changed_is_an_error():
    torch.manual_seed(0)
    model = Shifted()
    planned = by_modules(model)
    with pytest.raises(ReplayError, match="an input of 'blocks"):
        gradients(planned, between=lambda _: model.shift.add_(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.after = nn.GRU(32, 32), Block()

    def forward(self, x):
        return self.after(self.cell(x)[0])


@pytest.mark.parametrize("make", [net, lambda: nn.Sequential(Recurrent(), Recurrent(), mlp(2))])
def test_parameters_swapped_by_functional_call(make):
    """As of MAML and task vectors: gradients were those of the model's own parameters."""
    plain = make()
    planned = by_modules(copy.deepcopy(plain), "85%")
    found = []
    for model in (plain, planned):
        swapped = {
            name: (it.detach() * 1.5).requires_grad_() for name, it in plain.named_parameters()
        }
        swapped |= {name: it.clone() for name, it in plain.named_buffers()}

        def run(x, model=model, swapped=swapped):
            return torch.func.functional_call(model, swapped, (x,))

        wanted = [it for it in swapped.values() if it.requires_grad]
        found.append([*gradients(model, wanted, run=run), *swapped.values()])
    assert same(*found)
    assert same(planned.parameters(), plain.parameters())
    assert same(planned.buffers(), plain.buffers())
    assert same(gradients(planned), gradients(plain))


def freeze(model):
    for it in model[1].parameters():
        it.requires_grad_(requires_grad=False)


def test_weights_frozen_in_between():
    """torch raised a CheckpointError, as other tensors were saved."""
    results = []
    for model in (net(), by_modules(net())):
        torch.manual_seed(1)
        loss = model(SAMPLE).square().mean()
        freeze(model)
        loss.backward()
        results.append(grads(model))
        assert not any(it.requires_grad for it in model[1].parameters())
    assert same(*results)


def test_an_input_frozen_in_between():
    results = []
    for model in (net(), by_modules(net())):
        torch.manual_seed(1)
        given = SAMPLE.clone().requires_grad_()
        loss = model(given).square().mean()
        given.requires_grad_(requires_grad=False)
        loss.backward()
        results.append(grads(model))
    assert same(*results)


def test_modes_rates_and_hooks_of_the_forward_pass():
    results = []
    for model in (net(), by_modules(net())):
        hooks = [it.into.register_forward_hook(lambda *args: args[2] * 2) for it in model]

        def between(model, hooks=hooks):
            for hook in hooks:
                hook.remove()
            model.eval()
            for it in model:
                it.drop.p = 0.9

        results.append(gradients(model, between=between))
        assert not any(it.training or it.into._forward_hooks for it in model)
        assert all(it.drop.p == 0.9 for it in model)
    assert same(*results)


class Leaky(nn.Module):
    """Ends in an op whose kernel fills the noise that autograd saved before it ran."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.RReLU(0.1, 0.9))
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_block_that_ends_in_rrelu():
    """Gradients were NaN: its second run ended before the noise was drawn."""
    torch.manual_seed(0)
    planned = by_modules(Leaky(), "75%")
    assert verify(planned, SAMPLE).equal


class Attends(nn.Module):
    """Attention computes another way where its query is its key, the same tensor."""

    def __init__(self, by_name):
        super().__init__()
        layers = (nn.MultiheadAttention(32, 2) for _ in range(4))
        self.by_name, self.layers = by_name, nn.ModuleList(layers)

    def forward(self, x):
        x = x.unflatten(0, (8, 64)) if x.dim() == 2 else x
        for it in self.layers:
            x = x + (it(x, key=x, value=x) if self.by_name else it(x, x, x))[0]
        return x


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_that_is_given_twice_is_one_tensor_again(by_name):
    torch.manual_seed(0)
    model = Attends(by_name)
    expected, planned = gradients(model), by_modules(model)

    def run(x):
        # Hooks that give back another tensor than was saved.
        with torch.autograd.graph.save_on_cpu(), pytest.warns(PlanWarning, match="hooks for"):
            return planned(x)

    assert same(gradients(planned, run=run), expected)


def test_an_input_that_is_given_twice_and_frozen_in_between_is_one_tensor_again():
    torch.manual_seed(0)
    model = Attends(by_name=False)
    # So little that the first layer, which is given the input itself, runs again as well.
    sample = SAMPLE.view(8, 64, 32)
    planned = plan(model, sample, "60%", backend="modules", profile=False)

    def run(_):
        x = sample.clone().requires_grad_()
        out = planned(x)
        x.requires_grad_(False)
        return out

    assert same(gradients(planned, run=run), gradients(model))
