"""The trial step of `plan`: what only a real step can tell, and that it leaves no mark."""

import copy
import math
import resource

import pytest
import torch
from small_models import Everything, images, mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import ReplayError, TraceError, estimate, plan, planning, verify
from sn_memory.torch.eager import trial
from sn_memory.torch.model.results import differences

SETTINGS = {"profile": False, "time_limit_s": 2.0}


class Between(nn.Module):
    """A function between two linear layers, on images or on rows."""

    def __init__(self, function, rows=False):
        super().__init__()
        self.function, self.rows = function, rows
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(self.function(self, x))


def turned(x):
    """The same values, with the last two axes the other way round in memory."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def channels_last(x):
    return x.permute(0, 3, 1, 2)


# Kernels that lay their results out otherwise than the rules for fake tensors say.
LAID_OUT_OTHERWISE = {
    "layer norm": lambda net, x: net.norm(x).transpose(1, 2),
    "log softmax": lambda net, x: channels_last(x).log_softmax(1).permute(0, 2, 3, 1),
    "roll": lambda net, x: channels_last(x).roll(1, 1).permute(0, 2, 3, 1).exp(),
    "batch norm": lambda net, x: (
        functional.batch_norm(x.transpose(0, 1).contiguous(), None, None, training=True)
        .transpose(0, 1)
        .exp()
    ),
    "elu": lambda net, x: functional.elu(turned(x)),
    "hardswish": lambda net, x: functional.hardswish(turned(x)),
}


def step(model, sample, seed=1):
    """Train as users do; return the loss and the gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(sample).float().square().mean()
    loss.backward()
    return [loss.detach(), *(it.grad for it in model.parameters() if it.grad is not None)]


def same(model, planned, sample):
    expected = [it.clone() for it in step(model, sample)]
    return all(torch.equal(*it) for it in zip(expected, step(planned, sample), strict=True))


@pytest.mark.parametrize("name", LAID_OUT_OTHERWISE)
def test_results_lie_as_the_kernels_lay_them(name):
    model, sample = Between(LAID_OUT_OTHERWISE[name]), torch.randn(4, 6, 10, 12)
    planned = plan(model, sample, "100%", **SETTINGS)
    assert planned.sn_memory.backend == "graph"
    found = verify(planned, sample)
    assert found.equal
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    assert same(model, planned, torch.randn(4, 6, 10, 12))


class AsksForFakes(nn.Module):
    """Takes another course under fake tensors."""

    def __init__(self, otherwise):
        super().__init__()
        self.otherwise = otherwise
        self.layers = mlp(4)

    def forward(self, x):
        x = self.layers(x)
        if isinstance(x, FakeTensor):
            return self.otherwise(x)
        return x if (x != 0).any() else x + 1


def test_a_step_with_other_results_is_not_used():
    model, sample = AsksForFakes(lambda x: 1.01 * x), torch.randn(64, 32)
    with pytest.raises(TraceError, match="not those of the model"):
        plan(model, sample, "80%", backend="graph", **SETTINGS)
    with pytest.warns(PlanWarning, match="by regions.*not those of the model"):
        planned = plan(model, sample, "80%", **SETTINGS)
    assert planned.sn_memory.backend == "regions"
    assert same(model, planned, torch.randn(64, 32))


def test_a_step_that_rounds_otherwise_says_so():
    model, sample = AsksForFakes(lambda x: x * 3 / 3), torch.randn(64, 32)
    with pytest.warns(PlanWarning, match="but for rounding.*looks at values .*test_trial.py"):
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


def test_what_was_not_measured_beside_a_profiler_is_measured_later(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, sample = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 3, 3)), images()
    with torch.profiler.profile(profile_memory=True):
        first = plan(model, sample, "100%").sn_memory.plan
    assert any("by an upper rule" in it for it in first.notes)
    second = plan(model, sample, "100%").sn_memory.plan
    assert not any("by an upper rule" in it for it in second.notes)


def test_a_baseline_that_is_not_the_plain_steps_is_in_the_notes(monkeypatch):
    model, sample = mlp(3), torch.randn(16, 32)
    made = plan(model, sample, "100%").sn_memory
    assert not [it for it in made.plan.notes if "plain step" in it]
    whole = made.plan.baseline_peak_bytes
    found = trial.Trial(True, {}, plain_peak_bytes=whole * 100 // 102)
    monkeypatch.setattr(planning, "tried", lambda *_, **__: found)
    (note,) = [it for it in plan(model, sample, "100%").sn_memory.plan.notes if "plain step" in it]
    assert "(+2.0 %) as traced" in note


@pytest.mark.parametrize(
    ("profile", "backend"),
    [(torch.profiler.profile, "graph"), (torch.autograd.profiler.profile, "modules")],
)
def test_planned_while_the_caller_profiles(profile, backend):
    model, sample = mlp(3), torch.randn(16, 32)
    with profile(profile_memory=True) as seen:
        made = plan(model, sample, "100%", backend=backend)
        made(sample).sum().backward()
    assert made.sn_memory.backend == backend
    assert len(seen.key_averages()) > 0


class RaisesUnderFakes(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error, self.layers = error, mlp(4)

    def forward(self, x):
        if isinstance(x, FakeTensor):
            raise self.error
        return self.layers(x)


@pytest.mark.parametrize("error", [RuntimeError("of BF16 type"), KeyError("no")])
def test_any_failure_to_trace_leads_to_regions(error):
    model, sample = RaisesUnderFakes(error), torch.randn(64, 32)
    with pytest.warns(PlanWarning, match=f"{type(error).__name__} under fake tensors .*test_trial"):
        planned = plan(model, sample, "80%", **SETTINGS)
    assert planned.sn_memory.backend == "regions"
    assert same(model, planned, sample)
    with pytest.raises(TraceError, match=type(error).__name__):
        plan(model, sample, "80%", backend="graph", **SETTINGS)


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(32, 32), mlp(4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_reentrant_checkpoints_lead_to_modules():
    model, sample = Reentrant(), torch.randn(64, 32)
    with pytest.warns(PlanWarning, match="by modules"):
        planned = plan(model, sample, "100%", **SETTINGS)
    assert planned.sn_memory.backend == "modules"
    assert same(model, planned, sample)


@pytest.mark.filterwarnings("ignore::sn_memory.base.errors.PlanWarning")
def test_the_models_own_error_is_raised():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plan(mlp(2), torch.randn(4, 31), "80%", **SETTINGS)


OUT_OF_RANGE = (
    nn.Sequential(nn.Embedding(10, 32), *mlp(4)), torch.full((64,), 99), "index out of range",
)  # fmt: skip
OF_ANOTHER_TYPE = (mlp(4), torch.randn(64, 32, dtype=torch.float64), "same dtype")


@pytest.mark.parametrize(
    ("model", "sample", "own", "backend"),
    [
        *((*OUT_OF_RANGE, it) for it in ("auto", "compile", "modules")),
        *((*OF_ANOTHER_TYPE, it) for it in ("auto", "graph")),
    ],
)
def test_a_sample_on_which_the_model_fails_is_refused_with_its_error(model, sample, own, backend):
    """Its plan, and a budget in percent, would be those of a step that cannot run."""
    with pytest.raises(Exception, match=own) as refused:
        plan(model, sample, "100%", backend=backend, **SETTINGS)
    if backend != "modules":
        assert isinstance(refused.value, TraceError)
        assert "Pass a sample that the model takes" in str(refused.value)


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
    gradients = {name: it.grad for name, it in model.named_parameters()}
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
    assert all(it.grad is gradients[name] for name, it in model.named_parameters())
    assert all(it is own[name] for name, it in model.named_parameters())
    assert all(torch.equal(it, values[name]) for name, it in model.state_dict().items())


class FloatInside(nn.Module):
    """A product in float32 in the middle: inside autocast its backward pass is in bfloat16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.last.weight.T
        return self.last(torch.tanh(x))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def gradients_of(model, sample, *, inside):
    model.zero_grad(set_to_none=True)
    with autocast():
        loss = model(sample).float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [it.grad for it in model.parameters()]


@pytest.mark.parametrize("backend", ["graph", "modules", "compile"])
def test_backward_outside_autocast(backend):
    model, sample = FloatInside(), torch.randn(64, 32)
    with autocast():
        planned = plan(model, sample, "100%", backend=backend, **SETTINGS)
        assert verify(planned, sample).equal
    expected = gradients_of(model, sample, inside=False)
    got = gradients_of(planned, sample, inside=False)
    assert all(torch.equal(*it) for it in zip(expected, got, strict=True))


def test_backward_inside_autocast_is_refused_where_it_computes_otherwise():
    model, sample = FloatInside(), torch.randn(64, 32)
    with autocast():
        planned = plan(model, sample, "100%", **SETTINGS)
    outside, inside = (gradients_of(model, sample, inside=it) for it in (False, True))
    assert not all(torch.equal(*it) for it in zip(outside, inside, strict=True))
    with pytest.raises(ReplayError, match="inside torch"):
        gradients_of(planned, sample, inside=True)


def test_backward_inside_autocast_where_that_is_the_same():
    model, sample = mlp(4), torch.randn(64, 32)
    with autocast():
        planned = plan(model, sample, "80%", **SETTINGS)
    expected = gradients_of(model, sample, inside=True)
    got = gradients_of(planned, sample, inside=True)
    assert all(torch.equal(*it) for it in zip(expected, got, strict=True))


class Scored(nn.Module):
    """Returns a loss by that name, and scores beside it."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(4)

    def forward(self, x):
        scores = self.layers(x)
        return {"loss": scores.square().mean(), "scores": scores}


def test_verify_follows_the_loss():
    model, sample = Scored(), torch.randn(64, 32)
    planned = plan(model, sample, "90%", **SETTINGS)
    assert verify(planned, sample).equal
    seen = []

    def of_scores(out):
        seen.append(1)
        return out["scores"].sum()

    # Planned is the loss that the model returns; the first step with another says so.
    with pytest.warns(PlanWarning, match="an output other than the loss is requested"):
        found = verify(planned, sample, loss=of_scores)
    assert found.equal
    assert len(seen) == 6
    found = verify(planned, sample, loss=of_scores)
    assert found.equal
    assert len(seen) == 12
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


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (torch.zeros(4, 7), r"\[4, 7\] float32"),
        (torch.zeros(4, 65, dtype=torch.long), r"\[4, 65\] int64"),
        ((torch.zeros(4, 64), 3), r"\[4, 64\] float32, a int"),
    ],
)
def test_a_sample_that_the_model_does_not_take_is_said_with_its_shape(sample, told):
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    with pytest.raises(TraceError, match=f"does not run on the sample, {told}: .*Pass a sample"):
        plan(model, sample, "80%", **SETTINGS)
    with pytest.raises(TraceError, match=f"The sample is {told}; is it what"):
        estimate(model, sample)


class SetsAtFirst(nn.Module):
    """Notes something in its first forward pass, as `config.problem_type` in transformers."""

    def __init__(self, then=lambda model, x: x):
        super().__init__()
        self.inner, self.then, self.noted = mlp(6), then, None

    def forward(self, x):
        if self.noted is None:
            x = self.then(self, x)
            self.noted = "single"
        return self.inner(x)


def initialises(model, x):
    """As activation normalisation does, from its first batch."""
    with torch.no_grad():
        model.inner[0][0].weight.mul_(1 / x.std())
    return x


def test_what_a_first_forward_sets_is_planned_for():
    model, sample = SetsAtFirst(), torch.randn(128, 32)
    planned = plan(model, sample, "80%", backend="graph", **SETTINGS)
    assert model.noted is None
    assert same(model, planned, sample)


@pytest.mark.parametrize(
    ("then", "why"),
    [(initialises, "writes into parameters in its first run"), (lambda model, x: x * 2, "results")],
)
def test_a_first_forward_that_computes_otherwise_is_none_of_the_others(then, why):
    with pytest.raises(TraceError, match=why):
        plan(SetsAtFirst(then), torch.randn(128, 32), "80%", backend="graph", **SETTINGS)


def test_the_reason_against_a_plan_of_ops_is_in_the_refusal():
    class Counts(SetsAtFirst):
        def forward(self, x):
            self.noted = object()
            return self.inner(x)

    with pytest.raises(BudgetError, match=r"by regions because it cannot be traced: .*sets noted"):
        plan(Counts(), torch.randn(128, 32), "30%", **SETTINGS)


@pytest.mark.parametrize("kind", ["imaginary part", "inf and NaN", "sign of inf", "beside inf"])
def test_no_difference_is_lost_in_a_distance(kind):
    """Of complex numbers the imaginary part counts, and what is not finite hides nothing."""
    left = torch.tensor([1.0, 2.0, math.inf])
    right = left.clone()
    if kind == "imaginary part":
        left, right = torch.complex(left[:2], left[:2]), torch.complex(left[:2], -left[:2])
    elif kind == "inf and NaN":
        right[2] = math.nan
    elif kind == "sign of inf":
        right[2] = -math.inf
    else:
        right[0] = 3.0
    found = differences({"loss": left}, {"loss": right})
    assert found["loss"] > 0.5
    assert differences({"loss": left}, {"loss": left.clone()}) == {}
