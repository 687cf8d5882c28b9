"""The trial step of `plan`: what only a real step can tell, and that it leaves no mark."""

import copy
import math
import resource
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from small_models import Everything, images, mlp, module_of
from steps import grads, mean_of_squares, step_of
from steps import same as equal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import ReplayError, TraceError, estimate, plan, planning, verify
from sn_memory.torch.eager import trial
from sn_memory.torch.model.results import differences

SETTINGS = {"profile": False, "time_limit_s": 2.0}


def same(model, planned, sample, loss_of=mean_of_squares):
    results = []
    for it in (model, planned):
        torch.manual_seed(1)
        results.append(step_of(it, sample, loss_of=loss_of))
        model.zero_grad()
    return equal(*results)


def refused_with(words, model, sample):
    with pytest.raises(TraceError, match=words):
        plan(model, sample, "80%", backend="graph", **SETTINGS)


def asks_for_fakes(otherwise):
    """Takes another branch under fake tensors."""

    def forward(self, x):
        x = self.layers(x)
        if isinstance(x, FakeTensor):
            return otherwise(x)
        return x if (x != 0).any() else x + 1

    return module_of(forward, layers=mlp(4))


@pytest.mark.parametrize(("otherwise", "words"), [
    (lambda x: 1.01 * x, "not those of the model"),
    (lambda x: x @ x, "RuntimeError under fake tensors .*test_trial"),
    (lambda x: {}["no"], "KeyError under fake tensors .*test_trial"),
])  # fmt: skip
def test_a_step_that_fails_or_has_other_results_is_not_used(otherwise, words):
    model, sample = asks_for_fakes(otherwise), torch.randn(64, 32)
    refused_with(words.partition(" under")[0], model, sample)
    with pytest.warns(PlanWarning, match=words):
        planned = plan(model, sample, "80%", **SETTINGS)
    assert planned.sn_memory.backend == "regions"
    assert same(model, planned, torch.randn(64, 32))


def test_a_step_that_rounds_otherwise_says_so():
    model, sample = asks_for_fakes(lambda x: x * 3 / 3), torch.randn(64, 32)
    with pytest.warns(PlanWarning, match="except for rounding.*reads values .*test_trial.py"):
        planned = plan(model, sample, "80%", **SETTINGS)
    assert planned.sn_memory.backend == "graph"
    assert 0 < planned.sn_memory.trial.difference < 1e-6
    assert 0 < verify(planned, sample).difference < 1e-6


@pytest.mark.parametrize(("apart", "used"), [(6.3e-3, True), (0.02, True), (0.05, False)])
def test_as_far_as_the_model_is_from_itself_is_no_fault(apart, used):
    """Two steps of ResNet-50 in TF32 were 6.1e-3 apart on an H200, and a right plan 6.3e-3."""
    seen = [torch.zeros(1)]
    found = trial._judged({"gradient of a": apart}, {"gradient of b": 6.1e-3}, seen)
    assert bool(found.failure) != used
    assert trial._judged({"gradient of a": apart}, {}, seen).failure


def test_planned_while_the_caller_profiles():
    """What was not measured beside a profiler is measured later."""
    model, sample = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 3, 3)), images()
    profilers = (torch.autograd.profiler.profile, "modules"), (torch.profiler.profile, "graph")
    for profile, backend in profilers:
        with profile(profile_memory=True) as seen:
            planned = plan(copy.deepcopy(model), sample, "100%", backend=backend)
            planned(sample).sum().backward()
        assert planned.sn_memory.backend == backend
        assert len(seen.key_averages()) > 0
    assert any("by an upper rule" in it for it in planned.sn_memory.plan.notes)
    second = plan(model, sample, "100%").sn_memory.plan
    assert not any("by an upper rule" in it for it in second.notes)


def test_a_baseline_that_is_not_the_plain_steps_is_in_the_notes(monkeypatch):
    model, sample = mlp(3), torch.randn(16, 32)
    record = plan(model, sample, "100%").sn_memory
    assert not [it for it in record.plan.notes if "plain step" in it]
    whole = record.plan.baseline_peak_bytes
    found = trial.Trial(True, {}, plain_peak_bytes=whole * 100 // 102)
    monkeypatch.setattr(planning, "tried", lambda *_, **__: found)
    (note,) = [it for it in plan(model, sample, "100%").sn_memory.plan.notes if "plain step" in it]
    assert "(+2.0 %) by its trace" in note


def test_reentrant_checkpoints_lead_to_modules():
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x

    model = module_of(forward, first=nn.Linear(32, 32), layers=mlp(4))
    sample = torch.randn(64, 32)
    with pytest.warns(PlanWarning, match="by modules"):
        planned = plan(model, sample, "100%", **SETTINGS)
    assert planned.sn_memory.backend == "modules"
    assert same(model, planned, sample)


EMBEDS = nn.Sequential(nn.Embedding(10, 32), *mlp(2))
# A sample, how it is described, and the model's own error.
WRONG = {
    "width": (mlp(2), torch.zeros(4, 31), r"\[4, 31\] float32", "shapes cannot be multiplied"),
    "integers": (mlp(2), torch.zeros(4, 32).long(), r"\[4, 32\] int64", "dtype"),
    "two": (mlp(2), (torch.zeros(4, 32), 3), r"\[4, 32\] float32, a int", ""),
    "doubles": (mlp(2), torch.zeros(4, 32).double(), r"\[4, 32\] float64", "dtype"),
    "range": (EMBEDS, torch.full((64,), 99), r"\[64\] int64", "index out of range"),
}


@pytest.mark.filterwarnings("ignore::sn_memory.base.errors.PlanWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_sample_on_which_the_model_fails_is_refused_with_its_error_and_shape(name):
    """Its plan, and a budget in percent, would be those of a step that cannot run."""
    model, sample, described, own = WRONG[name]
    words = (
        f"does not run on the sample, {described}: .*{own}.*Pass a sample that the model accepts"
    )
    with pytest.raises(TraceError, match=words):
        plan(model, sample, "100%", **SETTINGS)
    if name in ("doubles", "range"):  # which tensors without values do not show
        for backend in ("graph", "compile", "modules"):
            with pytest.raises(Exception, match=own) as refused:
                plan(model, sample, "100%", backend=backend, **SETTINGS)
            assert isinstance(refused.value, TraceError) or backend == "modules"
    if name in ("width", "two"):
        with pytest.raises(TraceError, match=f"The sample is {described}; is it what"):
            estimate(model, sample)


def test_a_model_that_runs_and_has_no_plan_is_not_said_to_fail_on_the_sample():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.layer, torch.tanh, (x,))

    words = "runs on the sample, but has no plan, because .* the higher-order op cond"
    with pytest.raises(TraceError, match=words):
        plan(Branches(), torch.randn(64, 32), "100%", **SETTINGS)


@pytest.mark.parametrize("backend", ["graph", "compile", "modules"])
def test_a_wrong_input_raises_the_models_error_and_logs_nothing(backend, capfd, caplog):
    planned = plan(mlp(4), torch.randn(64, 32), "100%", backend=backend, **SETTINGS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        planned(torch.randn(64, 31))
    assert "fake_tensor" not in capfd.readouterr().err
    assert not [it for it in caplog.records if it.name.startswith("torch._subclasses")]


def test_a_trial_leaves_no_mark():
    model, sample = Everything(), images()
    model(sample).sum().backward()
    gradients = grads(model)
    values = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        # As those do who step in the backward pass.
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    own, chance = dict(model.named_parameters()), torch.get_rng_state()
    planned = plan(model, sample, "80%", **SETTINGS)
    assert planned.sn_memory.trial.compared
    assert not planned.sn_memory.trial.different
    verify(planned, sample)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(now is before for now, before in zip(grads(model), gradients, strict=True))
    assert all(it is own[name] for name, it in model.named_parameters())
    assert all(torch.equal(it, values[name]) for name, it in model.state_dict().items())


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def gradients_of(model, sample, *, inside):
    model.zero_grad(set_to_none=True)
    with autocast():
        loss = model(sample).float().square().sum()
    with autocast() if inside else nullcontext():
        loss.backward()
    return grads(model)


@pytest.mark.parametrize("backend", ["graph", "modules", "compile"])
def test_backward_outside_autocast(backend):
    """A product in float32 in the middle: inside autocast its backward pass is in bfloat16."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.last.weight.T
        return self.last(torch.tanh(x))

    model = module_of(forward, first=nn.Linear(32, 32), last=nn.Linear(32, 32))
    sample = torch.randn(64, 32)
    with autocast():
        planned = plan(model, sample, "100%", backend=backend, **SETTINGS)
        assert verify(planned, sample).equal
    expected = gradients_of(model, sample, inside=False)
    assert equal(expected, gradients_of(planned, sample, inside=False))
    if backend == "graph":
        # Inside, it is refused where it computes otherwise.
        assert not equal(expected, gradients_of(model, sample, inside=True))
        with pytest.raises(ReplayError, match="inside torch"):
            gradients_of(planned, sample, inside=True)


def test_backward_inside_autocast_where_that_is_the_same():
    model, sample = mlp(4), torch.randn(64, 32)
    with autocast():
        planned = plan(model, sample, "80%", **SETTINGS)
    assert equal(*(gradients_of(it, sample, inside=True) for it in (model, planned)))


def test_verify_follows_the_loss():
    """Of a model that returns a loss by that name, and scores beside it."""

    def forward(self, x):
        scores = self.layers(x)
        return {"loss": scores.square().mean(), "scores": scores}

    sample = torch.randn(64, 32)
    planned = plan(module_of(forward, layers=mlp(4)), sample, "90%", **SETTINGS)
    assert verify(planned, sample).equal
    of_scores = Mock(side_effect=lambda out: out["scores"].sum())
    # Planned is the loss that the model returns; the first step with another says so.
    with pytest.warns(PlanWarning, match="an output other than the loss is requested"):
        assert verify(planned, sample, loss=of_scores).equal
    assert of_scores.call_count == 6
    found = verify(planned, sample, loss=of_scores)
    assert found.equal
    assert of_scores.call_count == 12
    # Beside a few numbers of Python, which are tensors of 4 or 8 bytes while an op has them.
    assert found.measured_peak_bytes <= found.predicted_peak_bytes + 64
    assert found.predicted_peak_bytes <= planned.sn_memory.budget_bytes


def test_a_limit_of_the_process_counts_as_memory_that_is_not_there(monkeypatch):
    """A plain step that ulimit -d forbids is not tried: it would end the planning of it."""
    cpu = torch.device("cpu")
    assert trial.enough_memory(1000, cpu)
    for which in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        limits = {resource.RLIMIT_DATA: free, resource.RLIMIT_AS: free, which: (1, 1)}
        monkeypatch.setattr(resource, "getrlimit", limits.get)
        assert not trial.enough_memory(1000, cpu)


def sets_at_first(then=lambda model, x: x):
    """Notes something in its first forward pass, as `config.problem_type` in transformers."""

    def forward(self, x):
        if self.noted is None:
            x = then(self, x)
            self.noted = "single"
        return self.inner(x)

    return module_of(forward, inner=mlp(6), noted=None)


def initialises(model, x):
    """As activation normalisation does, from its first batch."""
    with torch.no_grad():
        model.inner[0][0].weight.mul_(1 / x.std())
    return x


def test_what_a_first_forward_sets_is_planned_for():
    model, sample = sets_at_first(), torch.randn(128, 32)
    planned = plan(model, sample, "80%", backend="graph", **SETTINGS)
    assert model.noted is None
    assert same(model, planned, sample)


@pytest.mark.parametrize(
    ("then", "why"),
    [(initialises, "writes into parameters in its first run"), (lambda model, x: x * 2, "results")],
)
def test_a_first_forward_that_computes_otherwise_is_none_of_the_others(then, why):
    refused_with(why, sets_at_first(then), torch.randn(128, 32))


def test_the_reason_against_a_plan_of_ops_is_in_the_refusal():
    def forward(self, x):
        self.noted = object()
        return self.inner(x)

    model = module_of(forward, inner=mlp(6), noted=None)
    with pytest.raises(BudgetError, match=r"by regions because it cannot be traced: .*sets noted"):
        plan(model, torch.randn(128, 32), "30%", **SETTINGS)


@pytest.mark.parametrize(("left", "right"), [
    ([1 + 1j, 2 + 2j], [1 - 1j, 2 - 2j]), ([1.0, 2.0, math.inf], [1.0, 2.0, math.nan]),
    ([1.0, 2.0, math.inf], [1.0, 2.0, -math.inf]), ([1.0, 2.0, math.inf], [3.0, 2.0, math.inf]),
])  # fmt: skip
def test_no_difference_is_lost_in_a_distance(left, right):
    """Of complex numbers the imaginary part counts, and what is not finite hides nothing."""
    left, right = torch.tensor(left), torch.tensor(right)
    assert differences({"loss": left}, {"loss": right})["loss"] > 0.5
    assert differences({"loss": left}, {"loss": left.clone()}) == {}
