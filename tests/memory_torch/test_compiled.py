"""The back end for torch.compile: its own joint graph, cut by a plan."""

import copy

import pytest
import torch
from small_models import Everything, images, mlp
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import TraceError, plan, verify
from sn_memory.torch.compile import backend as back_end

SETTINGS = {"profile": False, "planner": "sqrt_n", "backend": "compile", "compiler": "eager"}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def step(model, sample):
    torch.manual_seed(7)
    out = model(sample)
    out.backward(torch.sin(torch.arange(out.numel()).float()).view_as(out))
    gradients = [it.grad.clone() for it in model.parameters()]
    return [out.detach(), *gradients, *(it.clone() for it in model.buffers())]


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_bits_are_those_of_torch_compile(budget):
    """The reference is torch's own eager back end, whose dropout draws otherwise than eager."""
    model, sample = Everything(), images()
    theirs = torch.compile(copy.deepcopy(model), backend="aot_eager_default_partitioner")
    planned = plan(model, sample, budget, **SETTINGS)
    assert planned.sn_memory.backend == "compile"
    for mine, expected in zip(step(planned, sample), step(theirs, sample), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("budget", ["100%", "80%", "70%"])
def test_the_peak_is_as_planned(budget):
    model, sample = mlp(8), torch.randn(64, 32)
    planner = "liveness" if budget == "100%" else "sqrt_n"
    planned = plan(model, sample, budget, **{**SETTINGS, "planner": planner})
    found = verify(planned, sample)
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    assert found.equal, found.different
    made = planned.sn_memory.plan
    assert made.peak_bytes <= made.budget_bytes
    assert bool(made.decided("recompute")) == (budget != "100%")


def test_an_impossible_budget_is_refused_when_planning():
    model, sample = mlp(4), torch.randn(64, 32)
    before = {name: it.clone() for name, it in model.state_dict().items()}
    with pytest.raises(BudgetError) as refusal:
        plan(model, sample, 1000, **SETTINGS)
    assert refusal.value.budget_bytes == 1000
    assert all(torch.equal(it, before[name]) for name, it in model.state_dict().items())


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum().item() > 0 else x


def test_a_model_that_breaks_into_graphs():
    with pytest.raises(TraceError, match="one graph"):
        plan(Undecided(), torch.randn(2, 4), "100%", **SETTINGS)


def test_nothing_to_differentiate():
    model = mlp(2).requires_grad_(False)
    with pytest.raises(TraceError, match="no backward pass"):
        plan(model, torch.randn(4, 32), "100%", **SETTINGS)


def test_a_torch_without_the_hooks(monkeypatch):
    gone = ("torch._functorch.partitioners", "of_another_version")
    monkeypatch.setitem(back_end._HOOKS, "eager", (gone,))
    with pytest.raises(TraceError, match=r"written for torch 2\.13"):
        plan(mlp(2), torch.randn(4, 32), "100%", **SETTINGS)
    with pytest.raises(ValueError, match="expected one of inductor, eager"):
        plan(mlp(2), torch.randn(4, 32), "100%", backend="compile", compiler="gcc")


HOOKS = {
    "forward": lambda model: model.register_forward_hook(lambda *given: given[2] * 3),
    "forward-pre": lambda model: model.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    "backward-pre": lambda model: model.register_full_backward_pre_hook(lambda _, it: (it[0] * 2,)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_hooks_of_the_model_itself_run_once(hook, when):
    model, sample = mlp(5), torch.randn(64, 32)
    plain = copy.deepcopy(model)
    HOOKS[hook](plain)
    if when == "before":
        HOOKS[hook](model)
    planned = plan(model, sample, "80%", **SETTINGS)
    if when == "after":
        HOOKS[hook](planned)
    assert all(map(torch.equal, step(planned, sample), step(plain, sample)))


@pytest.mark.slow
# Each plan compiles for seconds; with eight places, as there are, it would take minutes.
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_plans_of_a_class_than_dynamo_has_places():
    sample = torch.randn(16, 32)
    models = [mlp(2) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    planned = [plan(it, sample, "100%", **SETTINGS) for it in models]
    for model, it in zip(models, planned, strict=True):
        assert all(map(torch.equal, step(it, sample), step(copy.deepcopy(model), sample)))


class Counted(nn.Module):
    """Statistics of batch norm, a buffer that decays, an attribute that each forward pass sets."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(4))
        )
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x):
        scale = self.scale.clone()
        out = torch.sin(self.layers(x) * scale) * scale
        self.scale.mul_(0.9)
        self.largest = out.detach().abs().max()
        return out


class Tokens(nn.Module):
    """A batch norm of tokens, channels last."""

    def __init__(self, *before):
        super().__init__()
        self.before = nn.Sequential(*before)
        self.norm, self.after = nn.BatchNorm1d(32), nn.Linear(32, 32)

    def forward(self, x):
        return self.after(self.norm(self.before(x).transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("before", [(), (nn.Linear(32, 32),)], ids=["first", "inside"])
def test_a_batch_norm_of_transposed_tokens(before):
    """torch's own aot_eager fails: the kernel lays its gradient out otherwise than torch's rule."""
    model, sample = Tokens(*before), torch.randn(16, 6, 32)
    planned = plan(copy.deepcopy(model), sample, "100%", **SETTINGS)
    for it in (planned, model):
        it(sample).square().mean().backward()
    pairs = zip(planned.parameters(), model.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6) for a, b in pairs)
    assert all(map(torch.equal, planned.buffers(), model.buffers()))


def _passes(model, left, right):
    """A pass that is thrown away, then two before one backward pass."""
    seen = []
    model(left)
    seen += [it.clone() for it in (*model.buffers(), model.largest)]
    loss = model(left).square().mean() - model(right).square().mean()
    seen += [it.clone() for it in (loss.detach(), *model.buffers(), model.largest)]
    loss.backward()
    return [*seen, *(it.grad for it in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("budget", ["100%", "85%"])
def test_what_a_forward_pass_writes_is_written_in_the_forward_pass(budget):
    model, (left, right) = Counted(), torch.randn(2, 64, 32)
    plain = copy.deepcopy(model)
    planned = plan(model, left, budget, **SETTINGS)
    assert planned.sn_memory.plan.decided("recompute") or budget == "100%"
    assert all(map(torch.equal, _passes(planned, left, right), _passes(plain, left, right)))


def test_inductor_writes_in_the_forward_pass_too():
    model, (left, right) = mlp(2), torch.randn(2, 64, 32)
    model = nn.Sequential(model, nn.BatchNorm1d(32))
    plain = copy.deepcopy(model)
    planned = plan(model, left, "100%", backend="compile", profile=False)
    for it in (planned, plain):
        it(left)
        (it(left).square().mean() - it(right).square().mean()).backward()
    assert planned[1].num_batches_tracked == plain[1].num_batches_tracked == 3
    for mine, theirs in zip(planned.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
