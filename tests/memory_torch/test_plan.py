"""A planned model is the model, within its budget: same bits, same statistics, same hooks."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from small_models import Everything, SeveralOutputs, images, mlp, module_of
from steps import exact, grads, same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sn_memory import BudgetError, PlanError
from sn_memory.torch import PlanWarning, ReplayError, TraceError, plan, verify
from sn_memory.torch.model.tracker import AllocationTracker

# A planner that answers at once: what is tested is that plans are obeyed, not how good they are.
SETTINGS = {"profile": False, "planner": "sqrt_n"}


def step(model, *args, **kwargs):
    """One step from a fixed state of chance; returns output, gradients, buffers, chance after."""
    torch.manual_seed(7)
    out = model(*args, **kwargs)
    out.backward(torch.sin(torch.arange(out.numel()).float()).view_as(out).to(out.dtype))
    gradients = [None if it is None else it.clone() for it in grads(model)]
    buffers = [it.clone() for it in model.buffers()]
    return [out.detach(), *gradients, *buffers, torch.get_rng_state()]


@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_bits_and_bytes(budget):
    model, sample = Everything(), images()
    planner = "liveness" if budget == "100%" else "sqrt_n"
    planned = plan(copy.deepcopy(model), sample, budget, profile=False, planner=planner)
    assert same(step(planned, sample), step(model, sample))
    exact(planned, sample)
    runs = [it.target for it in planned.sn_memory.plan.actions if it.kind == "run"]
    again = {name.partition("#")[0] for name in runs if runs.count(name) > 1}
    if budget == "100%":
        assert not again
    else:
        # Dropout and statistics: without these what was compared above were worth nothing.
        assert {"norm/native_batch_norm", "forward/bernoulli_"} <= again


def test_the_smallest_budget():
    model, sample = mlp(8), torch.randn(64, 32)
    with pytest.raises(BudgetError) as refusal:
        plan(model, sample, "1%", profile=False)
    least, given = refusal.value.peak_bytes, {"planner": refusal.value.plan, "profile": False}
    assert exact(plan(model, sample, least, profile=False), sample).measured_peak_bytes <= least
    passed = plan(model, sample, "100%", **given)
    assert passed.sn_memory.plan.actions == refusal.value.plan.actions
    assert verify(passed, sample).measured_peak_bytes == least
    with pytest.raises(BudgetError, match="the plan passed in needs"):
        plan(model, sample, least - 1, **given)
    with pytest.raises(PlanError):
        plan(mlp(7), sample, "100%", **given)


def test_it_is_the_model_and_copies_and_pickles_are_plain():
    model = mlp(2)
    planned = plan(model, torch.zeros(8, 32), "100%", **SETTINGS)
    assert isinstance(planned, nn.Sequential)
    assert planned is not model
    assert all(a is b for a, b in zip(planned.parameters(), model.parameters(), strict=True))
    assert list(planned.state_dict()) == list(model.state_dict())
    assert "sn_memory" not in model.__dict__
    for plain in (model, copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert type(plain) is nn.Sequential
        assert same(plain.state_dict().values(), planned.state_dict().values())


class Watch(TorchDispatchMode):
    """The ops that run, and the one that each memory came from."""

    def __init__(self):
        super().__init__()
        self.ran, self.makers = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ran.append(func.overloadpacket.__name__)
        if isinstance(result, torch.Tensor):
            self.makers[result.data_ptr()] = self.ran[-1]
        return result


@pytest.mark.filterwarnings("ignore:2 forward passes")  # The budget is one step's.
def test_steps_run_in_the_planned_order_and_hand_gradients_over():
    model, sample = mlp(4), torch.randn(64, 32)
    planned = plan(model, sample, "80%", **SETTINGS)
    record = planned.sn_memory
    output_gradient = torch.ones_like(planned(sample))
    with Watch() as watch:
        out = planned(sample)
        out.backward(output_gradient)
    graph = record.trace.graph
    runs = [it.target for it in record.plan.actions if it.kind == "run" and it.target != "loss"]
    wanted = [graph.ops[graph.op_index[it]].kind for it in runs]
    views = {"as_strided", "detach", "set_", "empty", "view", "device"}
    assert [it for it in watch.ran if it not in views] == wanted
    assert "clone" not in [watch.makers[it.data_ptr()] for it in grads(planned)]


def test_zeros_for_outputs_without_a_gradient_are_not_made():
    """Autograd would make them for every output, while the plan counts none."""

    def forward(self, x):
        x = self.layers(x)
        return x * 2, x.detach()

    sample = torch.randn(64, 32)
    for budget in ("100%", "90%"):
        exact(plan(module_of(forward, layers=mlp(4)), sample, budget, **SETTINGS), sample)


def test_one_tensor_passed_twice():
    model = module_of(lambda self, x, y: self.layer(x) * y, layer=nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    planned = plan(model, (x, x), "100%", **SETTINGS)
    assert verify(planned, (x, x)).equal
    # One input more than in the sample, and the budget was all that this needed.
    with pytest.warns(PlanWarning, match="above the budget"):
        planned(x, x.detach().clone().requires_grad_())


def test_frozen_parameters_are_part_of_the_plan():
    model, sample = mlp(3), torch.randn(8, 32)
    model[0].requires_grad_(False)
    planned = plan(model, sample, "100%", **SETTINGS)
    assert verify(planned, sample).equal
    assert model[0][0].weight.grad is None
    model[0].requires_grad_(True)
    with pytest.warns(PlanWarning, match="other parameters require gradients.*above the budget"):
        planned(sample).sum().backward()
    assert model[0][0].weight.grad is not None


# Whether the budget of a step in bfloat16 has room for one in float32 depends on what its kernels
# take: without AVX-512 there is none.
@pytest.mark.filterwarnings("ignore:a training step of Sequential finds gradients")
def test_autocast_is_replayed():
    model, sample = mlp(4), torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        planned = plan(model, sample, "100%", **SETTINGS)
        expected = step(copy.deepcopy(model), sample)
        assert expected[0].dtype == torch.bfloat16
        assert same(step(planned, sample), expected)
    assert planned(sample).dtype == torch.float32
    assert planned.sn_memory.kinds[-1].unlike == "autocast is otherwise"


@pytest.mark.filterwarnings("ignore:.* finds gradients")  # The budget is one step's.
def test_backward_twice_and_changes_in_between():
    planned = plan(mlp(2), torch.randn(4, 32), "100%", **SETTINGS)
    out = planned(torch.randn(4, 32)).sum()
    out.backward()
    with pytest.raises(ReplayError, match=r"second time.*retain_graph=True"):
        out.backward()
    out = planned(torch.randn(4, 32)).sum()
    with torch.no_grad():
        next(planned[1].parameters()).add_(1)
    with pytest.raises(ReplayError, match="changed in place"):
        out.backward()


def test_nothing_stays_behind():
    planned = plan(mlp(4), torch.randn(64, 32), "80%", **SETTINGS)
    gc.disable()
    try:
        out = planned(torch.randn(64, 32))
        held = weakref.ref(out.grad_fn)
        del out
        # No cycle: the node dies with the output, and all it held with it.
        assert held() is None
    finally:
        gc.enable()


def test_refusals():
    model, sample = mlp(2), torch.randn(4, 32)
    before = dict(model.__dict__)
    with pytest.raises(ValueError, match="expected one of auto, graph"):
        plan(model, sample, "100%", backend="xla", **SETTINGS)
    with pytest.raises(PlanError, match="some of keep, recompute, offload"):
        plan(model, sample, "100%", techniques=("keep", "compress"), **SETTINGS)
    with pytest.raises(PlanError, match="no plan for this sample"):
        verify(model, sample)
    with pytest.raises(TraceError, match="hashable"):
        plan(SeveralOutputs(), {"x": torch.zeros(2, 6), "offset": {1}}, "100%", **SETTINGS)
    assert model.__dict__ == before


def dropping():
    """Small layers, beside which the state of a generator is large."""

    def forward(self, x):
        return x + self.back(self.drop(nn.functional.gelu(self.drop(self.wide(x)))))

    parts = {"wide": nn.Linear(32, 128), "back": nn.Linear(128, 32), "drop": nn.Dropout(0.1)}
    return module_of(forward, **parts)


@pytest.mark.parametrize("backend", ["graph", "modules"])
def test_states_that_dropout_runs_again_from_count(backend):
    """On a CPU 5 KB each; the allocator sees them, whoever counts storages."""
    net, sample = nn.Sequential(*(dropping() for _ in range(6))), torch.randn(64, 32)
    planned = plan(net, sample, "60%", backend=backend, profile=False)
    made = planned.sn_memory.plan
    assert exact(planned, sample).measured_peak_bytes == made.peak_bytes
    planned(sample).square().mean().backward()
    net.zero_grad()
    with AllocationTracker([*planned.parameters(), sample]) as tracker:
        planned(sample).square().mean().backward()
    assert tracker.peak_bytes <= made.budget_bytes
    if backend == "graph":
        states = planned.sn_memory.trace.named.random_states
        runs = [it.target for it in made.actions if it.kind == "run"]
        assert any(runs.count(it.removesuffix(": random state")) > 1 for it in states)
