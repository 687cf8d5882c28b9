"""Where autograd asks for more than first derivatives: right, or one clear error, never silence."""

import copy
import warnings
from functools import cache

import pytest
import steps
import torch
import torch.autograd.forward_ad as forward_ad
from small_models import module_of
from steps import off
from torch import nn
from torch.autograd import functional, grad
from torch.func import functional_call

from sn_memory.base.errors import PlanError, PlanWarning
from sn_memory.torch import ReplayError, checkpoint_policy, compress_activations, plan

# torch's own: the first use of forward-mode AD loads rules that are scripted.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

SETTINGS = {"profile": False, "time_limit_s": 2.0}
WIDTH = 12
# Of sums in another order: second derivatives add up in another order where a plan is run.
ROUNDING = 1e-12


class Critic(nn.Module):
    """Smooth layers, so that second derivatives are not zero."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Softplus(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(self.norm(x))


def rows(seed=1, count=16):
    return steps.rows(count, seed, WIDTH).double()


def weights(model):
    return {name: it.detach() for name, it in model.named_parameters()}


def of(model, loss):
    """The gradients of a loss by all parameters; zeros where there is none."""
    return grad(loss, list(model.parameters()), materialize_grads=True)


def gradient_penalty(model):
    x = rows().requires_grad_()
    (slope,) = grad(model(x).sum(), x, create_graph=True)
    loss = model(rows(2)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    return [slope, *of(model, loss)]


def backward_with_a_graph(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward", UserWarning)  # torch: it may leak
        model(rows()).square().mean().backward(create_graph=True)
    slopes = [it.grad for it in model.parameters()]
    model.zero_grad()
    return [*slopes, *of(model, sum(it.square().sum() for it in slopes))]


def vectorized_hessian(model):
    return [functional.hessian(lambda x: model(x).exp().mean(), rows()[:2], vectorize=True)]


def maml(model):
    slopes = grad(model(rows()).square().mean(), list(model.parameters()), create_graph=True)
    fast = {
        name: it - 0.1 * slope
        for (name, it), slope in zip(model.named_parameters(), slopes, strict=True)
    }
    return of(model, functional_call(model, fast, (rows(2),)).square().mean())


def double_backward_trick(model):
    x, v = rows().requires_grad_(), torch.zeros(16, 1).double().requires_grad_()
    (slope,) = grad(model(x), x, v, create_graph=True)
    return grad(slope, v, rows(2))


def third_derivative(model):
    x = rows().requires_grad_()
    (first,) = grad(model(x).exp().mean(), x, create_graph=True)
    (second,) = grad(first.square().sum(), x, create_graph=True)
    return of(model, second.square().sum())


def func_grad(model):
    found = torch.func.grad(lambda w: functional_call(model, w, (rows(),)).square().mean())
    return list(found(weights(model)).values())


def func_per_sample(model):
    def loss(w, x):
        return functional_call(model, w, (x[None],)).square().mean()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights(model), rows())
    return list(found.values())


def func_vjp(model):
    out, back = torch.func.vjp(model, rows())
    return [out, *back(torch.ones_like(out))]


def func_hessian(model):
    return [torch.func.hessian(lambda x: model(x).exp().mean())(rows()[:2])]


def forward_mode(model):
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(rows(), rows(2)))
        return [*forward_ad.unpack_dual(out)]


def forward_mode_over_parameters(model):
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(it, it.detach().cos())
            for name, it in model.named_parameters()
        }
        return [*forward_ad.unpack_dual(functional_call(model, duals, (rows(),)))]


def forward_over_reverse(model):
    x = rows().requires_grad_()
    out = model(x)
    with forward_ad.dual_level():
        arriving = forward_ad.make_dual(torch.ones_like(out), out.detach().cos())
        return [*forward_ad.unpack_dual(grad(out, x, arriving)[0])]


def batched_backward(model):
    x = rows().requires_grad_()
    out = model(x).sum(0)
    return grad(out, x, torch.eye(3)[:, :1].double(), is_grads_batched=True)


# Those that are seen in the forward pass, and those that the backward pass meets.
FORWARD = (func_grad, func_per_sample, func_vjp, func_hessian)
FORWARD += (forward_mode, forward_mode_over_parameters)
BACKWARD = (gradient_penalty, backward_with_a_graph, vectorized_hessian, maml)
BACKWARD += (double_backward_trick, third_derivative, forward_over_reverse, batched_backward)
# What the graph's back end does, others do at the same places: a few of either.
FEW = (func_per_sample, forward_mode_over_parameters, gradient_penalty, backward_with_a_graph)
FEW += (forward_over_reverse, batched_backward)

# What the error says of those that have first derivatives only.
REFUSED_OR_RIGHT = {
    "graph": "",
    "modules": "",
    "compile": "Plan with backend='graph' or 'modules'",
    "regions": "ran as a planned region, which computes one gradient. Plan with backend='modul",
}


@cache
def planned_critics():
    """A model, and a planned copy by each back end."""
    torch.manual_seed(0)
    model = Critic().double()
    return model, {
        backend: plan(copy.deepcopy(model), rows(), "85%", backend=backend, **SETTINGS)
        for backend in REFUSED_OR_RIGHT
    }


@pytest.fixture
def critics(_kernels_are_not_compiled):
    return planned_critics()


# torch.compile looks whether inputs have gradients, which are no leaves here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
# By modules, of the first of these ways: see test_waiting_passes.py.
@pytest.mark.filterwarnings("ignore:.*create_graph=True:sn_memory.base.errors.PlanWarning")
@pytest.mark.parametrize(
    ("backend", "way"),
    [("graph", way) for way in FORWARD + BACKWARD]
    + [(it, way) for it in REFUSED_OR_RIGHT if it != "graph" for way in FEW]
    + [("modules", maml), ("modules", third_derivative)],
)
def test_it_is_right_or_one_clear_error(critics, backend, way):
    model, planned = critics[0], critics[1][backend]
    expected, refused = way(model), REFUSED_OR_RIGHT[backend]
    if refused and way in BACKWARD:
        with pytest.raises(ReplayError, match=refused):
            way(planned)
        planned.zero_grad()
        return
    planned.sn_memory.inputs.warned.clear()
    planned.sn_memory.inputs.warned.add("several")
    if backend == "modules" and way in BACKWARD:
        found = way(planned)
    else:
        with pytest.warns(PlanWarning, match="runs without its plan") as warned:
            found = way(planned)
        assert [it.filename for it in warned] == [__file__]
    assert off(found, expected) <= (0 if backend == "modules" else ROUNDING)


def test_the_budget_of_a_strict_plan_is_not_broken():
    planned = plan(Critic().double(), rows(), "100%", backend="graph", strict=True, **SETTINGS)
    for ask in (gradient_penalty, func_grad):
        words = "torch.func" if ask is func_grad else "create_graph=True"
        with pytest.raises(PlanError, match=f"strict: .*{words}"):
            ask(planned)


class Drawing(nn.Module):
    """Draws random numbers, keeps statistics and a count, and has a tensor that is no parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.scale = torch.linspace(0.5, 1.5, WIDTH).double()

    def forward(self, x, *, several):
        x = self.drop(torch.tanh(self.norm(self.first(x)) * self.scale))
        y = self.last(x + torch.randn_like(x)).sin()
        return {"several": [y, y.cos()], "one": x.sum(), "count": several} if several else y


def drawn(model):
    """Second derivatives of some outputs; the state of chance and all buffers afterwards."""
    torch.manual_seed(3)
    x = rows().requires_grad_()
    out = model(x, several=2)
    between = torch.rand(2)
    loss = out["several"][1].square().sum() + out["one"]
    (slope,) = grad(loss, x, create_graph=True)
    found = of(model, slope.square().sum() + out["several"][0].sum())
    exact = [out["several"][0], slope, between, torch.rand(2), *model.buffers()]
    return exact, found


def test_the_second_forward_pass_is_the_first_one_once_more():
    model = Drawing().double()
    torch.manual_seed(1)
    planned = plan(copy.deepcopy(model), {"x": rows(), "several": 2}, "100%", **SETTINGS)
    assert planned.sn_memory.backend == "graph"
    with pytest.warns(PlanWarning, match="runs without its plan"):
        exact, found = drawn(planned)
    expected = drawn(model)
    assert all(map(torch.equal, exact, expected[0]))
    assert off(found, expected[1]) <= ROUNDING


def test_autocast_is_as_it_was():
    model, x = Critic(), torch.randn(16, WIDTH)

    def slopes(model):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(given).float()
        (slope,) = grad(out.sum(), given, create_graph=True)
        return [slope, *of(model, slope.square().sum())]

    with torch.autocast("cpu", torch.bfloat16):
        planned = plan(copy.deepcopy(model), x, "100%", backend="graph", **SETTINGS)
    with pytest.warns(PlanWarning, match="runs without its plan"):
        found = slopes(planned)
    # Gradients of parameters in bfloat16 are summed in another order.
    assert torch.equal(found[0], slopes(model)[0])
    assert off(found, slopes(model)) <= 2.0**-7


def momentum():
    """A momentum encoder: its forward pass moves parameters, and reads them."""

    def forward(self, x):
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return (self.fast(x) - self.slow(x)).square()

    fast = nn.Linear(WIDTH, WIDTH)
    return module_of(forward, fast=fast, slow=copy.deepcopy(fast).requires_grad_(False))


def spectral():
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("model", "name"),
    [(spectral, "0.parametrizations.weight.0._u"), (momentum, "slow.weight, which it reads")],
)
def test_what_the_forward_pass_wrote_over_is_named(model, name):
    planned = plan(model(), rows().float(), "100%", backend="graph", **SETTINGS)
    x = rows().float().requires_grad_()
    with pytest.raises(ReplayError, match=f"writes over {name}"):
        grad(planned(x).sum(), x, create_graph=True)


@torch.no_grad()
def changed_weight(planned, x):
    planned.last.bias += 1


@torch.no_grad()
def changed_input(planned, x):
    x += 1


def changed_mode(planned, x):
    planned.norm.eps = 0.1


@pytest.mark.parametrize("change", [changed_weight, changed_input, changed_mode])
def test_what_changed_since_the_forward_pass_is_said(change):
    planned = plan(Critic().double(), rows(), "100%", backend="graph", **SETTINGS)
    x = rows().requires_grad_()
    out = planned(x).sum()
    change(planned, x)
    with pytest.raises(ReplayError, match=r"changed in place|norm.eps"):
        grad(out, x, create_graph=True)


def test_with_the_state_on_the_host_it_is_refused():
    model = Critic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = rows().float()
    planned = plan(model, sample, "100%", state="host", optimizer=optimizer, **SETTINGS)
    with pytest.raises(ReplayError, match="its state on the host"):
        planned(sample).sum().backward(create_graph=True)
    with pytest.raises(PlanError, match="its state on the host"):
        torch.func.vjp(planned, sample)


ONCE, HOOKS = "only allowed to backward once", "saved tensor hooks"


@pytest.mark.parametrize(
    ("way", "words"),
    [(gradient_penalty, ONCE), (maml, ONCE), (func_grad, HOOKS), (func_vjp, HOOKS)],
)
def test_a_policy_is_right_or_refused_by_torch(critics, way, words):
    policy = checkpoint_policy(critics[0], rows(), "90%", profile=False)
    wrapped = policy.wrap(copy.deepcopy(critics[0]))
    with pytest.raises(RuntimeError, match=words):
        way(wrapped)
    for right in (forward_mode, batched_backward):
        assert off(right(wrapped), right(critics[0])) == 0


@pytest.mark.filterwarnings("ignore:nothing that Sequential saves")  # in forward mode
@pytest.mark.parametrize("way", [maml, third_derivative, forward_mode])
def test_compressed_activations_have_second_derivatives(way, monkeypatch):
    """Right but for the rounding of eight bits, or not compressed."""
    monkeypatch.setattr(f"{__name__}.rows", lambda seed=1: steps.rows(256, seed, WIDTH))
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    expected = way(model)
    with compress_activations(copy.deepcopy(model), bits=8) as compressed:
        found = way(compressed.model)
    assert 0 <= off(found, expected) < 0.05
