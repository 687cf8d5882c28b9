"""The back end for torch.compile: torch's own partitions, measured, and the fastest that fits."""

import copy
import logging
from functools import partial
from types import SimpleNamespace

import eager_kernels
import pytest
import torch
from late_imports import Late
from small_models import Everything, images, mlp
from steps import grads, same
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch import TraceError, plan, verify
from sn_memory.torch.compile import backend as back_end
from sn_memory.torch.model.tracker import AllocationTracker

partitioner, searches = (
    Late(f"sn_memory.torch.compile.{name}") for name in ("partitioner", "search")
)
SETTINGS = {"profile": False, "backend": "compile"}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def step(model, sample):
    torch.manual_seed(7)
    out = model(sample)
    out.backward(torch.sin(torch.arange(out.numel()).float()).view_as(out))
    gradients = [it.grad.clone() for it in model.parameters()]
    model.zero_grad()
    return [out.detach(), *gradients, *(it.clone() for it in model.buffers())]


def plainly_compiled(model):
    return torch.compile(copy.deepcopy(model), backend=eager_kernels.compile_fx)


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_bits_are_those_of_torch_compile(budget):
    """The reference is torch's own compiled step, whose dropout draws otherwise than eager."""
    model, sample = Everything(), images()
    theirs = plainly_compiled(model)
    planned = plan(model, sample, budget, **SETTINGS)
    assert planned.sn_memory.backend == "compile"
    for mine, expected in zip(step(planned, sample), step(theirs, sample), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("budget", ["100%", "80%", "75%"])
def test_the_peak_is_as_planned(budget):
    model, sample = mlp(8), torch.randn(64, 32)
    planned = plan(model, sample, budget, **SETTINGS)
    found = verify(planned, sample)
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    assert found.equal, found.different
    made = planned.sn_memory.plan
    assert made.peak_bytes <= made.budget_bytes
    assert bool(made.decided("recompute")) == (budget != "100%")
    assert ("activation_memory_budget" in repr(made)) == (budget != "100%")


def test_what_is_not_to_be_computed_again_is_not():
    model, sample = mlp(8), torch.randn(64, 32)
    with pytest.raises(BudgetError, match="the compiled step needs"):
        plan(model, sample, "80%", techniques=("keep",), **SETTINGS)
    assert plan(model, sample, "100%", techniques=("keep",), **SETTINGS).sn_memory.plan


def test_the_fastest_that_fits_is_taken(monkeypatch):
    """Of those measured; a partition is compiled and timed once, whichever settings give it."""
    model, sample = mlp(8), torch.randn(64, 32)
    timed = []

    def seconds(runs, inputs, *, rounds):
        timed.append(len(runs))
        return [float(it) for it in reversed(range(len(runs)))]

    monkeypatch.setattr("sn_memory.torch.compile.search.step_seconds", seconds)
    made = plan(model, sample, "75%", backend="compile").sn_memory.plan
    assert timed
    assert timed[0] > 2
    # The last one is the fastest here: of all that fit, that which saves least.
    assert made.seconds == 0.0 < made.baseline_seconds
    torch._dynamo.reset()
    untimed = plan(model, sample, "76%", **SETTINGS).sn_memory.plan
    assert len(timed) == 1
    assert len(untimed.decided("recompute")) < len(made.decided("recompute"))


def test_an_impossible_budget_is_refused_when_planning():
    """With the smallest that was measured, which can be had."""
    model, sample = mlp(4), torch.randn(64, 32)
    before = {name: it.clone() for name, it in model.state_dict().items()}
    with pytest.raises(BudgetError, match="The smallest budget found is") as refusal:
        plan(model, sample, 1000, **SETTINGS)
    error = refusal.value
    assert error.budget_bytes == 1000
    known = sum(it.nbytes for it in (*model.parameters(), sample))
    assert known < error.peak_bytes
    assert all(torch.equal(it, before[name]) for name, it in model.state_dict().items())
    torch._dynamo.reset()
    made = plan(model, sample, error.peak_bytes, **SETTINGS).sn_memory.plan
    assert made.peak_bytes <= error.peak_bytes


def test_what_computes_something_else_is_left_out(monkeypatch, caplog):
    """torch's own solvers may return plans that are wrong; each is held against the plain step."""
    model, sample = mlp(8), torch.randn(64, 32)

    def wrong(module, inputs, cut, **told):
        run = real(module, inputs, cut, **told)
        if not isinstance(cut, partitioner.BudgetPartitioner) or cut.setting.share != 0.5:
            return run
        return lambda *given: [it * 1.01 for it in run(*given)]

    real = partitioner.compile_step
    monkeypatch.setattr("sn_memory.torch.compile.search.compile_step", wrong)
    with caplog.at_level(logging.WARNING, "sn_memory"):
        planned = plan(copy.deepcopy(model), sample, "80%", **SETTINGS)
    assert "gives other results" in caplog.text
    assert planned.sn_memory.plan.setting[0] != 0.5


def test_a_step_that_has_no_room_to_run_is_no_plan(monkeypatch):
    def full(run, inputs):
        if len(seen) > 1:
            raise torch.OutOfMemoryError("no room")
        seen.append(run)
        return real(run, inputs)

    seen, real = [], searches.measured_step
    monkeypatch.setattr("sn_memory.torch.compile.search.measured_step", full)
    with pytest.raises(BudgetError):
        plan(mlp(8), torch.randn(64, 32), "75%", **SETTINGS)
    assert len(seen) == 2


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
    monkeypatch.setattr(back_end, "_HOOKS", (gone,))
    with pytest.raises(TraceError, match=r"written for torch 2\.13"):
        plan(mlp(2), torch.randn(4, 32), "100%", **SETTINGS)


HOOKS = {
    "forward": lambda model: model.register_forward_hook(lambda *given: given[2] * 3),
    "forward-pre": lambda model: model.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    "backward-pre": lambda model: model.register_full_backward_pre_hook(lambda _, it: (it[0] * 2,)),
}


@pytest.mark.parametrize(
    ("hook", "when"), [("forward", "before"), ("forward-pre", "after"), ("backward-pre", "before")]
)
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


# With eight places, as there are, it would take minutes.
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_plans_of_a_class_than_dynamo_has_places():
    sample = torch.randn(16, 32)
    models = [mlp(2) for _ in range(torch._dynamo.config.recompile_limit + 2)]
    planned = [plan(it, sample, "100%", **SETTINGS) for it in models]
    for model, it in zip(models, planned, strict=True):
        assert all(map(torch.equal, step(it, sample), step(copy.deepcopy(model), sample)))


class Counted(nn.Module):
    """Statistics of batch norm, an attribute that each forward pass sets."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(4))
        )

    def forward(self, x):
        out = torch.sin(self.layers(x))
        self.largest = out.detach().abs().max()
        return out


def _passes(model, left, right):
    """A pass that is thrown away, then two before one backward pass."""
    seen = []
    model(left)
    seen += [it.clone() for it in (*model.buffers(), model.largest)]
    loss = model(left).square().mean() - model(right).square().mean()
    seen += [it.clone() for it in (loss.detach(), *model.buffers(), model.largest)]
    loss.backward()
    return [*seen, *(it.grad for it in model.parameters()), *model.buffers()]


def test_what_a_forward_pass_writes_is_written_in_the_forward_pass():
    model, (left, right) = Counted(), torch.randn(2, 64, 32)
    plain = copy.deepcopy(model)
    planned = plan(model, left, "100%", **SETTINGS)
    for mine, theirs in zip(
        _passes(planned, left, right), _passes(plain, left, right), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def products_are_saved(ctx, op, *args, **kwargs):
    product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


class Tagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(6)

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, products_are_saved)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts).sin()


def test_a_must_save_of_the_user_is_saved(monkeypatch):
    """A selective checkpoint whose products must be saved: they are, in each partition."""
    seen = seen_of(monkeypatch, Tagged(), torch.randn(64, 32), lambda search: search)
    tagged = {
        it.name
        for it in partitioner.results_of(seen.plain.partition.forward)
        if it.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    }
    assert tagged
    for share in (0.7, 0.3, 0.1):
        assert tagged <= set(seen.recorder.partition(partitioner.Setting(share, "dp")).saved())


def test_a_budget_of_nothing_is_never_asked_for():
    """torch's short cut for it heeds no mark, and draws random numbers anew."""
    for share in (0, 1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            partitioner.Setting(share, "dp")


def test_the_allocator_sees_what_the_dispatcher_does_not():
    x = torch.zeros(256)
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    with AllocationTracker([x]) as tracker:
        first = allocate((1000,), (1,), torch.float32)
        del first
        allocate((500,), (1,), torch.float32)
    assert (tracker.start_bytes, tracker.peak_bytes, tracker.live_bytes) == (1024, 5024, 1024)


def test_what_an_op_takes_for_itself_is_no_storage():
    x = torch.rand(64, 64)
    peaks = []
    for kernels in (False, True):
        with AllocationTracker([x], kernels=kernels) as tracker:
            made = torch.linalg.inv(x)
        peaks.append(tracker.peak_bytes)
    assert peaks[0] == x.nbytes + made.nbytes
    assert peaks[1] > peaks[0]


@pytest.mark.parametrize("way", ["torch.compile", "compile()"])
def test_what_was_compiled_stays_compiled(way):
    model, sample = mlp(4), torch.randn(64, 32)
    given = copy.deepcopy(model)
    if way == "torch.compile":
        given = torch.compile(given)
    else:
        given.compile()
    planned = plan(given, sample, "80%", profile=False)
    assert planned.sn_memory.backend == "compile"
    planned(sample).sum().backward()
    model(sample).sum().backward()
    assert same(grads(planned), grads(model))


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(4)

    def forward(self, x):
        x = self.layers(x)
        return x * 2 if len(repr(x)) > 10**9 else x


@pytest.mark.parametrize("more", [{}, {"planner": "sqrt_n"}])
def test_what_cannot_be_compiled_whole_says_so(more):
    """Nor is what asks for a planner of ops."""
    given = torch.compile(mlp(4) if more else Asking())
    with pytest.warns(PlanWarning, match=r"was compiled and is planned without torch\.compile"):
        planned = plan(given, torch.randn(64, 32), "80%", profile=False, **more)
    assert planned.sn_memory.backend in ("graph", "modules")


def test_what_compile_does_not_do_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="no copy to the host is safe"):
        plan(mlp(2), torch.randn(4, 32), "90%", techniques=("keep", "offload"), **SETTINGS)
    with pytest.raises(ValueError, match="searches no graph of ops"):
        plan(mlp(2), torch.randn(4, 32), "90%", planner="sqrt_n", **SETTINGS)


def test_other_back_ends_still_refuse_what_was_compiled():
    with pytest.raises(TraceError, match=r"given to torch\.compile"):
        plan(torch.compile(mlp(2)), torch.randn(4, 32), "90%", backend="graph")


class _Seen(Exception):  # noqa: N818 - ends the planning
    pass


def seen_of(monkeypatch, model, sample, look):
    """Return what `look` makes of the search that torch.compile's graph is handed to."""
    seen = []

    def note(self):
        seen.append(look(self))
        raise _Seen

    with monkeypatch.context() as patch:
        patch.setattr(searches.Search, "best", note)
        with pytest.raises(Exception, match="_Seen"):
            plan(model, sample, 1, **SETTINGS)
    return seen[0]


def search_of(peaks, solvers, monkeypatch):
    """Return a search that knows torch's partitions by their peaks alone: none is compiled."""
    monkeypatch.setattr("sn_memory.torch.compile.search.SOLVERS", solvers)

    class Stairs(searches.Search):
        def __init__(self):
            self.asked = {}

        def candidate(self, setting, allowed):
            self.asked[setting.share, setting.solver] = None
            return SimpleNamespace(peak=peaks(setting.share, setting.solver))

        def peak_bytes(self, candidate):
            return candidate.peak

    return Stairs()


def test_where_no_budget_of_torchs_is_found_further_ones_are_tried(monkeypatch):
    """What a step holds is not monotone in torch's budget: below a fifth it may hold more again."""
    stairs = search_of(
        lambda share, _: 90 if 0.15 < share < 0.22 else 120, ("ilp", "dp"), monkeypatch
    )
    assert [it.peak for it in stairs.within(100)] == [90]
    assert {solver for _, solver in stairs.asked} == {"ilp", "dp"}
    assert list(stairs.asked)[-1] == (0.2, "ilp")


@pytest.mark.parametrize("half", [90, 120])
def test_a_large_share_that_holds_less_than_a_half_is_found(half, monkeypatch):
    """The half of U-Net's and Llama's holds more than 0.7, whether it keeps the bytes or not."""

    def peaks(share, _):
        return 80 if 0.65 < share < 0.75 else half if share == 0.5 else 120

    stairs = search_of(peaks, ("ilp", "dp"), monkeypatch)
    stairs.within(100)
    assert (0.7, "ilp") in stairs.asked
    # And then looked on above it, and not above the half.
    assert (0.8, "ilp") in stairs.asked
    assert (0.6, "ilp") not in stairs.asked


def test_the_other_solver_is_asked_near_to_where_the_first_one_ended(monkeypatch):
    peaks = {"ilp": lambda share: 210 * share, "dp": lambda share: 190 * share}
    stairs = search_of(lambda share, solver: peaks[solver](share), ("ilp", "dp"), monkeypatch)
    stairs.within(100)
    best = {}
    for share, solver in stairs.asked:
        if peaks[solver](share) <= 100:
            best[solver] = max(share, best.get(solver, 0))
    assert best["ilp"] > 100 / 210 - 0.02
    assert best["ilp"] < best["dp"] <= 100 / 190
    assert len([share for share, solver in stairs.asked if solver == "dp"]) == 3
    assert len(stairs.asked) == 11
