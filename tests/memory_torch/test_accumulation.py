"""Gradients are handed over as they are computed, one by one: what that is for beside overlap.

Several micro-batches before one step hold the gradients of the earlier ones all the while; those of
this one may not be held beside them until the end. And whoever is handed a gradient may use it at
once: autograd.grad, inputs=, a hook that takes the optimizer's step. What is there when a step
begins is planned for, by itself where the budget has no room for it.
"""

import copy
from functools import partial

import pytest
import torch
from small_models import Everything, images, maps_then_weights, mlp, module_of, wide
from steps import grads, mean_of_squares, same
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sn_memory import BudgetError, Device
from sn_memory.graph.liveness import unplanned_bytes
from sn_memory.torch import PlanWarning, ReplayError, TraceError, plan, trace, verify
from sn_memory.torch.accumulation import peak_of_several
from sn_memory.torch.model.tracker import AllocationTracker, StorageTracker

SETTINGS = {"profile": False, "time_limit_s": 1.0}
SEARCHED = {"profile": False, "time_limit_s": 5}
IN_SILENCE = pytest.mark.filterwarnings("ignore::sn_memory.base.errors.PlanWarning")


def twin(model, sample, budget, **more):
    """A planned copy of a model."""
    return plan(copy.deepcopy(model), sample, budget, **SETTINGS | more)


def weights_bytes(model):
    return sum(it.nbytes for it in model.parameters() if it.requires_grad)


def parametrized(model, kind):
    """A model whose linear layers have a parametrization of torch's."""
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear):
            kind(layer)
    return model


def with_gradients(model, sample, share):
    """A share of the unplanned peak of a step that finds gradients, in bytes.

    No more than has no room for them beside the plan of a step that finds none.
    """
    own = twin(model, sample, "100%").sn_memory.plan.peak_bytes
    traced = trace(model, sample, profile=False, accumulate=True)
    return min(int(share * unplanned_bytes(traced.graph)), own + weights_bytes(model) - 64)


class Tied(nn.Module):
    """An embedding that is the head too, a parameter that no output needs, and a frozen one."""

    def __init__(self, words=64, width=32):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.zeros(7))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, numbers):
        x = self.norm(self.words(numbers)) * self.frozen
        return self.head(nn.functional.dropout(torch.tanh(self.middle(x)), 0.1, self.training))


NETS = {
    "wide": (wide, lambda: torch.randn(4, 128)),
    "maps": (maps_then_weights, lambda: torch.randn(2, 3, 64, 64)),
    "mlp": (mlp, lambda: torch.randn(64, 32)),
    "everything": (Everything, images),
    "tied": (Tied, lambda: torch.randint(64, (2, 16))),
}


def accumulated(model, samples, known=(), kernels=False):
    """The peaks of micro-batches, and the gradients they sum up to, with the same masks."""
    torch.manual_seed(1)
    peaks, counted = [], partial(AllocationTracker, kernels=True) if kernels else StorageTracker
    for sample in samples:
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        held = [*model.parameters(), *model.buffers(), sample, *known, *gradients]
        with counted(held) as tracker:
            out = model(sample)
        output_gradient = torch.ones_like(out)
        tracker.meet(output_gradient)
        with tracker:
            out.backward(output_gradient)
        del out, output_gradient, gradients, held
        peaks.append(tracker.peak_bytes)
    return peaks, grads(model)


def known_of(planned):
    return [it for step in planned.sn_memory.inputs.all_steps for it in step.known]


def known_bytes(step):
    """Constants of a trace."""
    return sum(it.nbytes for it in step.known)


@pytest.mark.parametrize(("net", "ranks"), [("wide", 1), ("maps", 1), ("maps", 2)])
def test_micro_batches_take_what_torch_takes(net, ranks, among_ranks):
    among_ranks(ranks)
    model, sample = NETS[net][0](), NETS[net][1]()
    # With room for what is there, the plan of the first step is that of all.
    planned = twin(model, sample, "160%")
    step = planned.sn_memory.latest
    (first, *later), mine = accumulated(planned, [sample] * 3, step.known, kernels=True)
    peaks, plain = accumulated(model, [sample] * 3, kernels=True)
    assert first == step.plan.peak_bytes
    assert max(later) <= min(first + weights_bytes(model), max(peaks))
    assert not planned.sn_memory.inputs.later
    assert same(mine, plain)


@pytest.mark.parametrize("ranks", [1, 2])
def test_autograd_sees_the_parameters(ranks, among_ranks):
    among_ranks(ranks)
    model, sample = wide(3), torch.randn(4, 128)
    planned = twin(model, sample, "100%")
    expected = torch.autograd.grad(model(sample).sum(), list(model.parameters()))
    got = torch.autograd.grad(planned(sample).sum(), list(planned.parameters()))
    assert same(got, expected)
    # Some of them: what comes before them in the network is not run.
    some = [planned[4].weight, planned[2].bias]
    out = planned(sample).sum()
    assert same(torch.autograd.grad(out, some), (expected[4], expected[3]))
    with pytest.raises(ReplayError, match="second time"):
        torch.autograd.grad(out, planned[0].weight)
    planned(sample).sum().backward(inputs=some)
    assert same(grads(planned), [None, None, None, *expected[3:5], None])


def mixed():
    """Of a convolution the weight's gradient comes first, then what reads the weight."""

    def forward(self, x):
        for layer in self.convolutions:
            x = torch.tanh(layer(x))
        return self.last(torch.tanh(self.last(x)))

    convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
    return module_of(forward, convolutions=convolutions, last=nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "ranks", "budget", "keeps"),
    [(mixed, 1, "90%", False), (mixed, 2, "100%", False), (Everything, 1, 0.85, True)],
)
def test_the_optimizers_step_in_a_hook(make, ranks, budget, keeps, among_ranks):
    """A parameter changes once its gradient is there; hooks that keep it let the next find it."""
    among_ranks(ranks)

    def update(parameter):
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
            if keeps:
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = None

    def trained(model):
        torch.manual_seed(2)
        for it in model.parameters():
            it.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            mean_of_squares(model(sample)).backward()
        return list(model.parameters())

    model, sample = make(), images() if make is Everything else torch.randn(16, 4, 8, 8)
    if keeps:
        budget = with_gradients(model, sample, budget)
    planned = twin(model, sample, budget)
    assert bool(planned.sn_memory.plan.decided("recompute")) == (budget != "100%")
    assert same(trained(planned), trained(model))
    assert len(planned.sn_memory.inputs.later) == keeps


# Where weights are most of it, a gradient and what it is added to leave nothing to be saved.
SHARES = [("wide", 1.0), ("maps", 1.0), ("mlp", 0.85), ("everything", 0.7), ("tied", 0.95)]


@pytest.mark.parametrize(("net", "share"), SHARES)
def test_four_micro_batches_as_predicted(net, share):
    """Planned when met, in silence: later peaks are as predicted, and sums are torch's."""
    model, samples = NETS[net][0](), [NETS[net][1]() for _ in range(4)]
    budget = with_gradients(model, samples[0], share)
    planned = twin(model, samples[0], budget, **SEARCHED)
    assert not planned.sn_memory.inputs.later
    peaks, got = accumulated(planned, samples, known_of(planned))
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert later.plan.peak_bytes <= later.plan.budget_bytes == first.plan.budget_bytes == budget
    assert 0 <= peaks[0] - first.plan.peak_bytes <= known_bytes(later)
    # Constants of the other trace are there as well, and from the second on its own.
    most = known_bytes(first) + 2 * known_bytes(later)
    assert all(0 <= it - later.plan.peak_bytes <= most for it in peaks[1:])
    assert same(got, accumulated(model, samples)[1])


def test_what_cannot_be_kept_is_said_with_its_bytes():
    """And runs at the smallest peak that was found."""
    model, sample = wide(), torch.randn(4, 128)
    own = twin(model, sample, "100%").sn_memory.budget_bytes
    advice = r"Raise the budget: .*\.plan\(model, sample, \d+\)"
    for budget, backend, words in (
        ("100%", "graph", advice),
        (own, "graph", "The smallest peak found"),
        ("100%", "modules", r"with them it takes .* Raise the budget"),
    ):
        planned = twin(model, sample, budget, backend=backend, **SEARCHED)
        with pytest.warns(PlanWarning, match=words) as seen:
            peaks, got = accumulated(planned, [sample] * 3)
        assert [it.filename for it in seen] == [__file__]
        unplanned, expected = accumulated(copy.deepcopy(model), [sample] * 3)
        assert same(got, expected)
        text = str(seen[0].message)
        if backend == "modules":
            continue
        assert f"gradients of {weights_bytes(model) / 2**10:.4g} KiB" in text
        (later,) = planned.sn_memory.inputs.later.values()
        assert own < max(peaks) <= later.plan.peak_bytes < max(unplanned)
        if budget == "100%":
            # What the warning says to write keeps its budget, in all micro-batches.
            need = int(text.rpartition("sample, ")[2].partition(")")[0])
            assert need > own
            larger = twin(model, sample, need, **SEARCHED)
            assert max(accumulated(larger, [sample] * 3)[0]) <= need


def test_strict_raises():
    model, sample = wide(), torch.randn(4, 128)
    planned = plan(model, sample, "100%", strict=True, **SEARCHED)
    planned(sample).sum().backward()
    with pytest.raises(BudgetError, match="finds gradients") as refused:
        planned(sample)
    assert refused.value.peak_bytes > refused.value.budget_bytes == planned.sn_memory.budget_bytes


def test_a_new_kind_of_input_among_micro_batches():
    """It gets its plan when it comes, and one with gradients in place; the budget is one."""
    model = mlp()
    samples = [torch.randn(batch, 32) for batch in (64, 96, 96, 64)]
    planned = twin(model, samples[0], "150%", **SEARCHED)
    budget = planned.sn_memory.budget_bytes
    peaks, got = accumulated(planned, samples)
    assert max(peaks) <= budget
    assert same(got, accumulated(model, samples)[1])
    for step, later in planned.sn_memory.inputs.later.items():
        assert later.plan.peak_bytes <= budget
        assert later is not step


@IN_SILENCE
def test_gradients_that_others_left():
    """Of a part that is frozen by now, as a discriminator's: resident, and nothing is added."""
    model, sample = mlp(6), torch.randn(64, 32)
    for it in model[:3].parameters():
        it.requires_grad_(False)
        it.grad = torch.randn_like(it)
    left = [it.clone() for it in grads(model[:3])]
    held = sum(it.nbytes for it in left)
    planned = plan(model, sample, "100%", **SEARCHED)
    budget = planned.sn_memory.plan.peak_bytes
    peaks, _ = accumulated(planned, [sample] * 2, known_of(planned))
    (later,) = planned.sn_memory.inputs.later.values()
    extra = [it.bytes for it in later.trace.graph.storages if it.name.startswith("gradients that")]
    assert extra == [held]
    assert max(peaks) <= later.plan.peak_bytes
    assert budget + held >= peaks[0]
    assert same(grads(planned[:3]), left)


@pytest.mark.parametrize("backend", ["graph", "compile", "modules"])
def test_verify_counts_what_is_there(backend):
    model, sample = mlp(6), torch.randn(64, 32)
    # By modules what is measured holds new gradients beside those that are there.
    budget = with_gradients(model, sample, 0.95)
    if backend == "modules":
        budget += weights_bytes(model)
    planned = plan(model, sample, budget, backend=backend, profile=False)
    found = verify(planned, sample, accumulate=True)
    assert found.equal, found.different
    assert found.measured_peak_bytes <= found.predicted_peak_bytes + 8
    if backend != "modules":
        assert found.measured_peak_bytes >= 0.98 * found.predicted_peak_bytes
    without = verify(planned, sample)
    assert without.equal
    for it in (found, without):
        assert it.measured_peak_bytes <= planned.sn_memory.plan.budget_bytes
    assert without.unplanned_peak_bytes < found.unplanned_peak_bytes


def test_by_modules_a_choice_is_taken_beside_gradients():
    """Where the budget has no room for them beside the first choice, more modules run again."""
    model, sample = mlp(8), torch.randn(256, 32)
    own = twin(model, sample, "100%", backend="modules").sn_memory.plan.peak_bytes
    budget = own + weights_bytes(model) // 2
    planned = twin(model, sample, budget, backend="modules")
    peaks, got = accumulated(planned, [sample] * 3)
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert len(later.plan.decided("recompute")) > len(first.plan.decided("recompute"))
    assert max(peaks[1:]) <= later.plan.peak_bytes
    assert max(peaks) <= planned.sn_memory.budget_bytes
    assert same(got, accumulated(model, [sample] * 3)[1])


def test_what_waits_on_the_host_in_later_micro_batches():
    model, samples = mlp(8), [torch.randn(64, 32) for _ in range(3)]
    link = Device("slow link", 1e9, 1e9, 1e8, 1e8, 0.0)
    budget = with_gradients(model, samples[0], 0.85)
    moving = {"device": link, "techniques": ("keep", "offload")}
    planned = twin(model, samples[0], budget, **SEARCHED, **moving)
    peaks, got = accumulated(planned, samples)
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert later.program.host_copies
    blocks = sum(it.nbytes for step in (first, later) for it in step.ignored)
    assert same(got, accumulated(model, samples)[1])
    # A block on the host, where it is allocated while the step runs.
    assert max(peaks[1:]) <= later.plan.peak_bytes + blocks


@pytest.mark.parametrize(
    ("net", "passes", "together"), [("wide", 2, False), ("mlp", 3, True), ("everything", 2, True)]
)
def test_several_forward_passes_before_their_backward(net, passes, together):
    """What they take is said beforehand, with its bytes, and is not exceeded."""
    model, samples = NETS[net][0](), [NETS[net][1]() for _ in range(passes)]
    planned = twin(model, samples[0], "100%")
    step = planned.sn_memory.latest
    expected = peak_of_several(planned, step, {step: passes - 1})
    held = [*planned.parameters(), *planned.buffers(), *step.known, *samples]
    with StorageTracker(held) as it:
        outs = [planned(samples[0])]
        with pytest.warns(PlanWarning, match="2 forward passes of") as seen:
            outs.append(planned(samples[1]))
        assert [it.filename for it in seen] == [__file__]
        outs += [planned(sample) for sample in samples[2:]]
        backward(outs, together=together)
    # The numbers that the losses are, and their gradients.
    assert it.peak_bytes <= expected + 4 * 4 * passes
    # Of gradients one may be there twice, or not.
    largest = max(it.nbytes for it in model.parameters())
    assert it.peak_bytes >= 0.95 * (expected - largest)
    if net != "everything":  # Its dropout and its statistics go on from pass to pass.
        backward([model(sample) for sample in samples], together=together)
        assert all(map(torch.allclose, grads(planned), grads(model)))


def backward(outs, *, together):
    for loss in [sum(it.sum() for it in outs)] if together else [it.sum() for it in outs[::-1]]:
        loss.backward()


def test_forward_passes_that_ended_do_not_wait():
    model, sample = mlp(6), torch.randn(64, 32)
    planned = plan(model, sample, "100%", **SETTINGS)
    for _ in range(3):
        out = planned(sample)
        out.sum().backward()
        planned.zero_grad()
    planned(sample)  # Nobody holds what it returns.
    planned(sample).sum().backward()


def test_micro_batches_without_exchange_under_ddp(tmp_path):
    """DDP with `no_sync`: the last of four exchanges; gradients are those of the plain model."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model, samples = mlp(6), [torch.randn(64, 32) for _ in range(4)]
        budget = with_gradients(model, samples[0], 0.9)
        planned = twin(model, samples[0], budget)
        for it in (planned, model):
            wrapped = nn.parallel.DistributedDataParallel(it, bucket_cap_mb=0.004)
            with wrapped.no_sync():
                for sample in samples[:-1]:
                    mean_of_squares(wrapped(sample)).backward()
            mean_of_squares(wrapped(samples[-1])).backward()
            with pytest.raises(TraceError, match="Plan the module inside"):
                plan(wrapped, samples[0], budget, **SETTINGS)
        assert same(grads(planned), grads(model))
        assert len(planned.sn_memory.inputs.later) == 1
    finally:
        torch.distributed.destroy_process_group()


LOOKS = {"now": False}


class Looking(nn.Sequential):
    """Looks at a value where a global dict says so, which no guard sees."""

    def forward(self, x):
        return super().forward(x) if not LOOKS["now"] or x.sum().item() else x


def test_the_plan_there_is_runs_where_none_for_gradients_can_be(monkeypatch):
    plain, x = Looking(*mlp(6)), torch.randn(64, 32)
    planned = twin(plain, x, with_gradients(plain, x, 0.8), backend="graph")
    monkeypatch.setitem(LOOKS, "now", True)
    with pytest.warns(PlanWarning, match="It has no other plan, as that failed: .* depend on val"):
        found = accumulated(planned, [x] * 3)[1]
    assert same(found, accumulated(plain, [x] * 3)[1])


def test_inside_parametrize_cached():
    """What is traced there takes no weight from the cache, and leaves none in it."""
    plain, x = parametrized(mlp(6), parametrizations.weight_norm), torch.randn(64, 32)
    planned = twin(plain, x, with_gradients(plain, x, 0.95), backend="graph")
    for batch in (x, x, x[:40]):
        for model in (planned, plain):
            with parametrize.cached():
                accumulated(model, [batch])
    assert same(grads(planned), grads(plain))
    assert not any("modules" in kind.how for kind in planned.sn_memory.kinds)


@pytest.mark.parametrize(("backend", "kind", "says"), [
    ("graph", parametrizations.spectral_norm, r"is called inside parametrize.cached\(\), with"),
    ("modules", parametrizations.spectral_norm, "2 forward passes of"),
    ("modules", parametrizations.weight_norm, "2 forward passes of"),
])  # fmt: skip
def test_two_passes_in_parametrize_cached(backend, kind, says):
    """As a GAN's: cached weights are the same in both, and spectral_norm iterates once.

    Before, recorded calls iterated once each, and modules that ran again raised CheckpointError.
    """
    plain = parametrized(nn.Sequential(*(mlp(2) for _ in range(3))), kind)
    x = torch.randn(256, 32)
    planned = twin(plain, x, "85%", backend=backend)

    def step(model):
        with parametrize.cached():
            loss = model(x).square().mean() - model(x[:128]).square().mean()
        loss.backward()

    step(plain)
    with pytest.warns(PlanWarning, match=says):
        step(planned)
    assert same(grads(planned), grads(plain))
    assert same(list(planned.buffers()), list(plain.buffers()))


def test_copies_of_a_buffer_that_a_pass_changes_are_made_once():
    """Before, a second pass ahead of the backward pass of the first ended in a ReplayError."""
    layers = nn.Sequential(*(mlp(2) for _ in range(3)))
    plain, x = parametrized(layers, parametrizations.spectral_norm), torch.randn(512, 32)
    with pytest.raises(BudgetError) as refused:
        twin(plain, x, "1%", backend="graph")
    smallest = {"planner": refused.value.plan, "backend": "graph"}
    planned = twin(plain, x, refused.value.peak_bytes, **smallest)

    def loss(model):
        return model(x).square().mean() + model(x[:256]).square().mean()

    loss(plain).backward()
    with pytest.warns(PlanWarning, match="2 forward passes of"):
        found = loss(planned)
    found.backward()
    for one, other in zip(grads(planned), grads(plain), strict=True):
        torch.testing.assert_close(one, other)
