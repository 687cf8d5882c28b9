"""What nobody can plan: models, samples, optimizers, budgets. One error each, that helps."""

import copy

import pytest
import torch
from small_models import module_of
from steps import grads, same
from torch import nn

from sn_memory import BudgetError
from sn_memory.torch import ReplayError, TraceError, checkpoint_policy, estimate, plan, trace


class Alone(nn.Module):
    def forward(self, x):
        return x.sin().sum()


def caches(self, x, cache):
    cache.append(x)
    return self.layer(x).relu()


def cached():
    """Its layers write into what it hands them, as models of transformers do with use_cache."""

    def forward(self, x):
        cache = []
        for layer in self.layers:
            x = layer(x, cache)
        return x.sum()

    layers = nn.ModuleList(module_of(caches, layer=nn.Linear(8, 8)) for _ in range(3))
    return module_of(forward, layers=layers)


def net():
    wide = [nn.Linear(64, 64), nn.GELU()]
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), *wide, nn.Linear(64, 8))


def lazy():
    return nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyLinear(8))


def of_inference():
    with torch.inference_mode():
        return torch.randn(256, 8)


def planned(**settings):
    return plan(net(), X, "90%", profile=False, **settings)


X = torch.randn(256, 8)
QUICK = {"profile": False}
ENTRIES = {
    "plan": lambda model: plan(model, X, "80%", **QUICK),
    "by modules": lambda model: plan(model, X, "80%", backend="modules"),
    "trace": lambda model: trace(model, X, **QUICK),
    "estimate": lambda model: estimate(model, X),
    "policy": lambda model: checkpoint_policy(model, X, "80%", **QUICK),
}
MODELS = [
    (lambda: nn.Linear, TypeError, r"got the class Linear.*Make one: Linear\("),
    (lambda: len, TypeError, "got a builtin_function_or_method len as model.*torch.nn.Module"),
    (lambda: of_inference, TypeError, "got a function of_inference as model"),
    (Alone, TraceError, "Alone has no parameters"),
    (lazy, TraceError, r"'0.weight' and 3 other tensors.*Call model\(sample\) once"),
]


@pytest.mark.parametrize(
    ("entry", "at"), [(it, at) for it in ENTRIES for at in range(5) if it == "plan" or at in (0, 4)]
)
def test_what_is_no_model_to_plan(entry, at):
    model, kind, text = MODELS[at]
    with pytest.raises(kind, match=text):
        ENTRIES[entry](model())


def of_meta(**settings):
    return plan(net().to("meta"), X, "90%", **settings)


PERCENT = 'budget is 70 B, for percent pass "70%"'
ALONE = "parameters, inputs and everything else .* take 28.53 KiB alone"
EXPORTED = r"torch.export.*planned Sequential.*copy.deepcopy\(model\)"
INFERENCE = r"tensor 0 of the sample was made in torch.inference_mode.*clone\(\)"
CASES = [
    (lambda: planned(optimizer="adamw"), TypeError, "got optimizer 'adamw'.*torch.optim.AdamW"),
    (lambda: estimate(net(), X, optimizer="sgd"), TypeError, "torch.optim.SGD"),
    (lambda: plan(net(), of_inference(), "80%", **QUICK), TraceError, INFERENCE),
    (lambda: plan(net(), of_inference(), "80%", backend="modules"), TraceError, INFERENCE),
    (lambda: plan(net(), X, "70", **QUICK), BudgetError, PERCENT),
    (lambda: plan(net(), X, "70", backend="modules"), BudgetError, PERCENT),
    (lambda: checkpoint_policy(net(), X, 70, **QUICK), BudgetError, PERCENT),
    (lambda: plan(net(), X, 9000, **QUICK), BudgetError, ALONE),
    (lambda: checkpoint_policy(cached(), X, "80%", **QUICK), TraceError, "pass use_cache=False in"),
    (lambda: torch.export.export(planned(), (X,)), TraceError, EXPORTED),
    (lambda: torch.jit.trace(planned(), X), TraceError, "torch.jit.*planned Sequential"),
    (lambda: torch.jit.script(planned()), TraceError, "torch.jit.*planned Sequential"),
    (lambda: torch.fx.symbolic_trace(planned()), TraceError, "torch.fx.*planned Sequential"),
    (lambda: torch.fx.symbolic_trace(nn.Sequential(planned())), TraceError, "torch.fx.*planned"),
    (lambda: of_meta(**QUICK)(X), ReplayError, "on the meta device.*to_empty"),
    (lambda: of_meta(backend="modules"), TraceError, "on the meta device"),
    (lambda: of_meta(backend="compile"), TraceError, "on the meta device"),
]


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize(("call", "kind", "text"), CASES)
def test_messages(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_an_input_made_in_inference_mode_is_run_by_a_plan():
    model = planned()
    model(of_inference()).sum().backward()
    assert model.sn_memory.inputs.count
    # What is exported instead.
    exported = torch.export.export(copy.deepcopy(model), (X,))
    assert exported.module()(X).shape == (256, 8)


class Rows(nn.Module):
    """Takes a nested or a sparse tensor, or what it is made of."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, values=None):
        if values is not None and x.dim() == 1:
            x = torch.nested.nested_tensor_from_jagged(values, x)
        elif values is not None:
            x = torch.sparse_coo_tensor(x, values, (16, 8), check_invariants=True)
        if x.is_nested:
            return self.inner(x).values().square().mean()
        return self.inner(x.to_dense()).square().mean()


def of_rows(layout):
    if layout in ("jagged", "strided"):
        parts = [torch.randn(n, 8) for n in (5, 9, 3)]
        return torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    x = torch.randn(16, 8).relu()
    return x.to_sparse_csr() if layout == "sparse_csr" else x.to_sparse()


@pytest.mark.parametrize("layout", ["jagged", "strided", "sparse_coo", "sparse_csr"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_what_is_no_plain_tensor_is_refused_with_what_to_pass(layout):
    """When planning or estimating, and while training; not where no gradient is wanted."""
    given, settings = of_rows(layout), {"profile": False, "time_limit_s": 1}
    for backend in ("auto", "modules"):
        with pytest.raises(TraceError, match=f"tensor of layout torch.{layout}.* Pass those"):
            plan(Rows(), given, "101%", backend=backend, **settings)
    with pytest.raises(TraceError, match=f"tensor of layout torch.{layout}.* Pass those"):
        estimate(Rows(), given)
    trained = plan(Rows(), torch.randn(17, 8), "101%", **settings)
    with pytest.raises(TraceError, match=f"tensor of layout torch.{layout}"):
        trained(given)
    with torch.no_grad():
        assert layout == "strided" or trained(given).isfinite()


@pytest.mark.parametrize("layout", ["jagged", "sparse_coo"])
def test_what_it_is_made_of_is_planned(layout):
    given, model = of_rows(layout), Rows()
    if layout == "jagged":
        parts = {"x": given.offsets(), "values": given.values().detach()}
    else:
        parts = {"x": given._indices(), "values": given._values()}
    of_parts = plan(copy.deepcopy(model), parts, "101%", backend="modules")
    for it in (of_parts, model):
        it(**parts).backward()
    assert same(grads(of_parts), grads(model))


def test_a_net_of_torchs_layers_alone_is_named_by_the_layers_line():
    """It said "place unknown"."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))  # counts its batches
    with pytest.raises(TraceError, match=r"depend on values.*nn/modules/batchnorm\.py:\d+"):
        plan(model, torch.ones(4, 8), "100%", backend="graph", profile=False)
