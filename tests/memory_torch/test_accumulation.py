"""Gradients are handed over as they are made, one by one: what that is for beside overlap.

Several micro-batches before one step hold the gradients of the earlier ones all the while; those of
this one may not be held beside them until the end. And whoever is handed a gradient may use it at
once: autograd.grad, inputs=, a hook that takes the optimizer's step. What is there when a step
begins is planned for, by itself where the budget has no room for it.
"""

import copy
import sys
import warnings
from functools import partial

import pytest
import torch
from small_models import Everything, images, mlp
from steps import grads, same
from torch import nn

from sn_memory import BudgetError, Device
from sn_memory.graph.liveness import unplanned_bytes
from sn_memory.torch import PlanWarning, ReplayError, StorageTracker, plan, trace, verify
from sn_memory.torch.accumulation import peak_of_several
from sn_memory.torch.model.tracker import AllocationTracker

SETTINGS = {"profile": False, "time_limit_s": 1.0}


def wide(layers=6, width=128):
    return nn.Sequential(
        *(it for _ in range(layers) for it in (nn.Linear(width, width), nn.GELU()))
    )


def head():
    """Large maps first, large weights last: gradients that one rank puts off."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)),
        *(nn.Flatten(), nn.Linear(8 * 8 * 8, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def among(ranks, monkeypatch):
    """Plan as one of so many ranks that train together."""
    module = sys.modules[plan.__module__]
    monkeypatch.setattr(module, "exchanges_gradients", lambda: ranks > 1)


def with_gradients(model, sample, share):
    """A share of the unplanned peak of a step that finds gradients, in bytes.

    No more than has no room for them beside the plan of a step that finds none.
    """
    own = plan(copy.deepcopy(model), sample, "100%", **SETTINGS).sn_memory.plan.peak_bytes
    held = sum(it.nbytes for it in model.parameters() if it.requires_grad)
    traced = trace(model, sample, profile=False, accumulate=True)
    return min(int(share * unplanned_bytes(traced.graph)), own + held - 64)


NETS = {"wide": (wide, (4, 128)), "head": (head, (2, 3, 64, 64))}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("net", list(NETS))
def test_micro_batches_take_what_torch_takes(net, ranks, monkeypatch):
    among(ranks, monkeypatch)
    make, shape = NETS[net]
    model, sample = make(), torch.randn(shape)
    # With room for what is there, the plan of the first step is that of all.
    planned = plan(copy.deepcopy(model), sample, "160%", **SETTINGS)
    step = planned.sn_memory.latest
    (first, *later), mine = accumulated(planned, [sample] * 3, step.known, kernels=True)
    peaks, plain = accumulated(model, [sample] * 3, kernels=True)
    assert first == step.plan.peak_bytes
    held = sum(it.nbytes for it in model.parameters())
    assert max(later) <= first + held
    assert max(later) <= max(peaks)
    assert same(mine, plain)


@pytest.mark.parametrize("ranks", [1, 2])
def test_autograd_sees_the_parameters(ranks, monkeypatch):
    among(ranks, monkeypatch)
    model, sample = wide(3), torch.randn(4, 128)
    planned = plan(copy.deepcopy(model), sample, "100%", **SETTINGS)
    expected = torch.autograd.grad(model(sample).sum(), list(model.parameters()))
    got = torch.autograd.grad(planned(sample).sum(), list(planned.parameters()))
    assert all(map(torch.equal, got, expected))
    # Some of them: what comes before them in the network is not run.
    some = [planned[4].weight, planned[2].bias]
    got = torch.autograd.grad(planned(sample).sum(), some)
    assert all(map(torch.equal, got, (expected[4], expected[3])))
    planned(sample).sum().backward(inputs=some)
    assert torch.equal(planned[4].weight.grad, expected[4])
    assert planned[0].weight.grad is None
    assert planned[4].bias.grad is None


def test_what_is_left_of_a_backward_pass_is_not_run_again():
    planned = plan(wide(3), torch.randn(4, 128), "100%", **SETTINGS)
    out = planned(torch.randn(4, 128)).sum()
    torch.autograd.grad(out, planned[4].weight)
    with pytest.raises(ReplayError, match="second time"):
        torch.autograd.grad(out, planned[0].weight)


@pytest.mark.parametrize("budget", ["100%", "90%"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_optimizers_step_in_a_hook(ranks, budget, monkeypatch):
    """A parameter may change as soon as its gradient is handed over, also one used twice."""
    among(ranks, monkeypatch)

    class Mixed(nn.Module):
        """Of a convolution the weight's gradient is made first, then what reads the weight."""

        def __init__(self):
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            for layer in self.convolutions:
                x = torch.tanh(layer(x))
            return self.last(torch.tanh(self.last(x)))

    def trained(model):
        def update(parameter):
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
            parameter.grad = None

        for it in model.parameters():
            it.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(sample).square().sum().backward()
        return list(model.parameters())

    model, sample = Mixed(), torch.randn(16, 4, 8, 8)
    planned = plan(copy.deepcopy(model), sample, budget, profile=False)
    runs = [it.target for it in planned.sn_memory.plan.actions if it.kind == "run"]
    assert (len(set(runs)) < len(runs)) == (budget != "100%")
    assert all(map(torch.equal, trained(planned), trained(model)))


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


def numbers():
    return torch.randint(64, (2, 16))


MORE = {
    "wide": (wide, lambda: torch.randn(4, 128)),
    "head": (head, lambda: torch.randn(2, 3, 64, 64)),
    "mlp": (mlp, lambda: torch.randn(64, 32)),
    "everything": (Everything, images),
    "tied": (Tied, numbers),
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
    return [it for step in planned.sn_memory.inputs.every for it in step.known]


# Where weights are most of it, a gradient and what it is added to leave nothing to be saved.
TIGHT = [("mlp", 0.85), ("everything", 0.7), ("tied", 0.95)]


@pytest.mark.parametrize(("net", "share"), [*((net, 1.0) for net in MORE), *TIGHT])
def test_four_micro_batches_as_predicted(net, share):
    """The peak of each later one is what was predicted, within the budget; sums are torch's."""
    make, sample_of = MORE[net]
    model, samples = make(), [sample_of() for _ in range(4)]
    budget = with_gradients(model, samples[0], share)
    planned = plan(copy.deepcopy(model), samples[0], budget, profile=False, time_limit_s=5)
    record = planned.sn_memory
    peaks, got = accumulated(planned, samples, known_of(planned))
    (first,), (later,) = record.steps.values(), record.inputs.later.values()
    assert later.plan.peak_bytes <= later.plan.budget_bytes == first.plan.budget_bytes == budget
    assert 0 <= peaks[0] - first.plan.peak_bytes <= known_bytes(later)
    # Constants of the other trace are there as well, and from the second on its own.
    most = known_bytes(first) + 2 * known_bytes(later)
    assert all(0 <= it - later.plan.peak_bytes <= most for it in peaks[1:])
    assert same(got, accumulated(model, samples)[1])


@pytest.mark.parametrize(("net", "budget"), [("mlp", "100%"), ("everything", "99%")])
def test_planned_for_when_first_met(net, budget):
    """Nobody said anything of micro-batches: the budget is kept all the same, silently."""
    make, sample_of = MORE[net]
    model, samples = make(), [sample_of() for _ in range(4)]
    planned = plan(copy.deepcopy(model), samples[0], budget, profile=False, time_limit_s=5)
    assert not planned.sn_memory.inputs.later
    peaks, got = accumulated(planned, samples, known_of(planned))
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert max(accumulated(copy.deepcopy(model), samples)[0]) > first.plan.budget_bytes
    assert later.plan.peak_bytes <= later.plan.budget_bytes == first.plan.budget_bytes
    assert max(peaks) <= first.plan.budget_bytes + known_bytes(later)
    # The second is the step it was planned in: torch's constants come to be there.
    assert all(0 <= it - later.plan.peak_bytes <= 2 * known_bytes(later) for it in peaks[1:])
    assert same(got, accumulated(model, samples)[1])


def known_bytes(step):
    """Constants of a trace."""
    return sum(it.nbytes for it in step.known)


def test_what_cannot_be_kept_is_said_with_its_bytes():
    model, sample = wide(), torch.randn(4, 128)
    planned = plan(copy.deepcopy(model), sample, "100%", profile=False, time_limit_s=5)
    with pytest.warns(
        PlanWarning, match=r"Raise the budget: .*\.plan\(model, sample, \d+\)"
    ) as seen:
        accumulated(planned, [sample] * 4)
    assert [it.filename for it in seen] == [__file__]
    text, held = str(seen[0].message), sum(it.nbytes for it in model.parameters())
    assert f"gradients of {held / 2**10:.4g} KiB" in text
    # What the warning says to write keeps its budget, in all micro-batches.
    need = int(text.rpartition("sample, ")[2].partition(")")[0])
    assert need > planned.sn_memory.budget_bytes
    larger = plan(copy.deepcopy(model), sample, need, profile=False, time_limit_s=5)
    assert max(accumulated(larger, [sample] * 3)[0]) <= need


def test_bytes_that_cannot_be_kept_run_at_the_smallest_peak():
    model, sample = wide(), torch.randn(4, 128)
    own = plan(model, sample, "100%", **SETTINGS).sn_memory.plan.budget_bytes
    planned = plan(copy.deepcopy(model), sample, own, profile=False, time_limit_s=5)
    with pytest.warns(PlanWarning, match="The smallest peak found") as seen:
        peaks, got = accumulated(planned, [sample] * 3)
    assert [it.filename for it in seen] == [__file__]
    (later,) = planned.sn_memory.inputs.later.values()
    assert own < max(peaks) <= later.plan.peak_bytes < max(accumulated(model, [sample] * 3)[0])
    assert same(got, grads(model))


def test_strict_raises():
    model, sample = wide(), torch.randn(4, 128)
    planned = plan(model, sample, "100%", profile=False, time_limit_s=5, strict=True)
    planned(sample).sum().backward()
    with pytest.raises(BudgetError, match="finds gradients") as refused:
        planned(sample)
    assert refused.value.peak_bytes > refused.value.budget_bytes == planned.sn_memory.budget_bytes


def test_a_new_kind_of_input_among_micro_batches():
    """It gets its plan when it comes, and one with gradients in place; the budget is one."""
    model = mlp()
    samples = [torch.randn(batch, 32) for batch in (64, 96, 96, 64)]
    planned = plan(copy.deepcopy(model), samples[1][:64], "150%", profile=False, time_limit_s=5)
    budget = planned.sn_memory.budget_bytes
    peaks, got = accumulated(planned, samples)
    assert max(peaks) <= budget
    assert same(got, accumulated(model, samples)[1])
    for step, later in planned.sn_memory.inputs.later.items():
        assert later.plan.peak_bytes <= budget
        assert later is not step


def test_where_there_is_room_nothing_is_planned_again():
    model, sample = wide(), torch.randn(4, 128)
    planned = plan(copy.deepcopy(model), sample, "20MiB", **SETTINGS)
    peaks, got = accumulated(planned, [sample] * 3, known_of(planned))
    assert not planned.sn_memory.inputs.later
    held = sum(it.nbytes for it in model.parameters())
    assert max(peaks) <= planned.sn_memory.plan.peak_bytes + held <= 20 << 20
    assert same(got, accumulated(model, [sample] * 3)[1])


def test_gradients_that_are_zeros():
    """`zero_grad(set_to_none=False)`, and steps of an optimizer between."""
    torch.manual_seed(0)
    model, sample = Everything(), images()
    planned = plan(copy.deepcopy(model), sample, "100%", **SETTINGS)

    def trained(model):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(sample).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        assert same(trained(planned), trained(model))
    assert len(planned.sn_memory.inputs.later) == 1


def test_gradients_that_others_left():
    """Of a part that is frozen by now, as a discriminator's: resident, and nothing is added."""
    model, sample = mlp(6), torch.randn(64, 32)
    for layer in model[:3]:
        for it in layer.parameters():
            it.requires_grad_(False)
            it.grad = torch.randn_like(it)
    left = [it.grad.clone() for it in model[:3].parameters()]
    held = sum(it.nbytes for it in left)
    planned = plan(copy_with_gradients(model), sample, "100%", profile=False, time_limit_s=5)
    budget = planned.sn_memory.plan.peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        peaks, _ = accumulated(planned, [sample] * 2, known_of(planned))
    (later,) = planned.sn_memory.inputs.later.values()
    extra = [it.bytes for it in later.trace.graph.storages if it.name.startswith("gradients that")]
    assert extra == [held]
    assert max(peaks) <= later.plan.peak_bytes
    assert budget + held >= peaks[0]
    assert same([it.grad for it in planned[:3].parameters()], left)


def copy_with_gradients(model):
    made = copy.deepcopy(model)
    for mine, its in zip(made.parameters(), model.parameters(), strict=True):
        mine.grad = its.grad
    return made


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_the_optimizers_step_in_a_hook_that_keeps_gradients(share):
    """A parameter changes as soon as its gradient was added; nothing of the step reads it later."""

    def trained(model):
        torch.manual_seed(2)

        def update(parameter):
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
                parameter.grad.mul_(0.5)

        for it in model.parameters():
            it.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(sample).square().mean().backward()
        return list(model.parameters())

    model, sample = Everything(), images()
    budget = with_gradients(model, sample, share)
    planned = plan(copy.deepcopy(model), sample, budget, profile=False, time_limit_s=5)
    assert same(trained(planned), trained(model))
    assert len(planned.sn_memory.inputs.later) == 1


def test_sections_are_no_more_than_before(monkeypatch):
    """A weight and its bias are added one after the other: one section of the backward pass."""
    among(2, monkeypatch)
    model, sample = head(), torch.randn(2, 3, 64, 64)
    planned = plan(model, sample, with_gradients(model, sample, 1.0), **SETTINGS)
    accumulated(planned, [sample] * 2)
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert len(later.program.backward) <= len(first.program.backward)


@pytest.mark.parametrize("backend", ["graph", "compile", "modules"])
def test_verify_counts_what_is_there(backend):
    model, sample = mlp(6), torch.randn(64, 32)
    # By modules what is measured holds new gradients beside those that are there.
    budget = with_gradients(model, sample, 0.95)
    if backend == "modules":
        budget += sum(it.nbytes for it in model.parameters())
    planned = plan(model, sample, budget, backend=backend, profile=False)
    found = verify(planned, sample, accumulate=True)
    assert found.equal, found.different
    assert found.measured_peak_bytes <= found.predicted_peak_bytes + 8
    if backend != "modules":
        assert found.measured_peak_bytes >= 0.98 * found.predicted_peak_bytes
    assert found.measured_peak_bytes <= planned.sn_memory.plan.budget_bytes
    without = verify(planned, sample)
    assert without.equal
    assert without.measured_peak_bytes <= planned.sn_memory.plan.budget_bytes
    assert without.unplanned_peak_bytes < found.unplanned_peak_bytes


def test_by_modules_it_is_said():
    model, sample = wide(), torch.randn(4, 128)
    planned = plan(copy.deepcopy(model), sample, "100%", backend="modules")
    with pytest.warns(PlanWarning, match=r"with them it takes .* Raise the budget") as seen:
        got = accumulated(planned, [sample] * 3)[1]
    assert len(seen) == 1
    assert same(got, accumulated(model, [sample] * 3)[1])


def test_by_modules_a_choice_is_made_beside_gradients():
    """Where the budget has no room for them beside the first choice, more modules run again."""
    model, sample = mlp(8), torch.randn(256, 32)
    held = sum(it.nbytes for it in model.parameters())
    own = plan(copy.deepcopy(model), sample, "100%", backend="modules").sn_memory.plan.peak_bytes
    planned = plan(copy.deepcopy(model), sample, own + held // 2, backend="modules")
    peaks, got = accumulated(planned, [sample] * 3)
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert len(later.plan.decided("recompute")) > len(first.plan.decided("recompute"))
    assert max(peaks[1:]) <= later.plan.peak_bytes
    assert max(peaks) <= planned.sn_memory.budget_bytes
    assert same(got, accumulated(model, [sample] * 3)[1])


def test_what_waits_on_the_host_in_later_micro_batches():
    model, samples = mlp(8), [torch.randn(64, 32) for _ in range(3)]
    settings = {"device": Device("slow link", 1e9, 1e9, 1e8, 1e8, 0.0), "time_limit_s": 5}
    planned = plan(
        *(copy.deepcopy(model), samples[0], with_gradients(model, samples[0], 0.85)),
        techniques=("keep", "offload"),
        profile=False,
        **settings,
    )
    peaks, got = accumulated(planned, samples)
    ((first, later),) = planned.sn_memory.inputs.later.items()
    assert later.program.host_copies
    blocks = sum(it.nbytes for step in (first, later) for it in step.ignored)
    assert same(got, accumulated(model, samples)[1])
    # A block on the host, where it is made while the step runs.
    assert max(peaks[1:]) <= later.plan.peak_bytes + blocks


@pytest.mark.parametrize(
    ("net", "passes", "together"),
    [("wide", 2, False), ("mlp", 3, True), ("mlp", 3, False), ("everything", 2, True)],
)
def test_several_forward_passes_before_their_backward(net, passes, together):
    """What they take is said beforehand, with its bytes, and is not exceeded."""
    make, sample_of = MORE[net]
    model, samples = make(), [sample_of() for _ in range(passes)]
    planned = plan(copy.deepcopy(model), samples[0], "100%", **SETTINGS)
    step = planned.sn_memory.latest
    said = peak_of_several(planned, step, {step: passes - 1})
    held = [*planned.parameters(), *planned.buffers(), *step.known, *samples]
    with StorageTracker(held) as it:
        outs = [planned(samples[0])]
        with pytest.warns(PlanWarning, match="2 forward passes of") as seen:
            outs.append(planned(samples[1]))
        assert [it.filename for it in seen] == [__file__]
        outs += [planned(sample) for sample in samples[2:]]
        backward(outs, together=together)
    torch_outs = [model(sample) for sample in samples]
    # The numbers that the losses are, and their gradients.
    assert it.peak_bytes <= said + 4 * 4 * passes
    # Of gradients one may be there twice, or not.
    largest = max(it.nbytes for it in model.parameters())
    assert it.peak_bytes >= 0.95 * (said - largest)
    if net != "everything":  # Its dropout and its statistics go on from pass to pass.
        backward(torch_outs, together=together)
        assert all(map(torch.allclose, grads(planned), grads(model)))


def backward(outs, *, together):
    if together:
        sum(it.sum() for it in outs).backward()
        return
    for it in outs[::-1]:
        it.sum().backward()


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
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model, samples = mlp(6), [torch.randn(64, 32) for _ in range(4)]
        budget = with_gradients(model, samples[0], 0.9)
        planned = plan(copy.deepcopy(model), samples[0], budget, **SETTINGS)
        got = [exchanged(it, samples) for it in (planned, model)]
        assert same(*got)
        assert len(planned.sn_memory.inputs.later) == 1
    finally:
        torch.distributed.destroy_process_group()


def exchanged(model, samples):
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004)
    with wrapped.no_sync():
        for sample in samples[:-1]:
            wrapped(sample).square().mean().backward()
    wrapped(samples[-1]).square().mean().backward()
    return [it.grad.clone() for it in model.parameters()]
