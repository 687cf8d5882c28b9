"""Passes that wait, and graphs that are kept: right, and never beyond the budget in silence.

Several forward passes before one backward pass, and a backward pass that keeps its graph, take more
than the step that was measured. Where that is more than the budget a warning says so beforehand,
with the bytes; a loop that does neither hears nothing.
"""

import copy
import gc
import weakref
from functools import cache
from types import SimpleNamespace

import pytest
import steps
import torch
from region_models import WIDTH, Looks
from small_models import Everything, images, mlp
from steps import grads, same
from torch import nn
from torch.autograd import grad

from sn_memory.torch import PlanWarning, StorageTracker, plan
from sn_memory.torch.accumulation import peak_of_several
from sn_memory.torch.model.tracker import AllocationTracker

SETTINGS = {"profile": False, "time_limit_s": 1.0}
BY_PARTS = pytest.mark.parametrize("backend", ["modules", "regions"])


class ReturnsObject(Looks):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x))


def layers():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def rows(seed=0):
    return steps.rows(512, seed)


@cache
def planned_once(backend, net):
    model = net(make=layers)
    planned = plan(copy.deepcopy(model), rows(), "70%", backend=backend, **SETTINGS)
    assert planned.sn_memory.plan.decided("recompute")
    return planned, model


def planned_and_plain(backend, net=Looks):
    """As if planned for each test; that takes seconds."""
    planned, model = planned_once(backend, net)
    planned.zero_grad()
    model.zero_grad()
    planned.sn_memory.inputs.warned.clear()
    for step in planned.sn_memory.inputs.all_steps:
        step.warned.clear()
    return planned, model


def one_loss(model, count):
    """As a GAN's critic of real and of generated rows, or a contrastive loss of several views."""
    sum(model(rows(seed)) for seed in range(count)).backward()


def reversed_order(model, count):
    losses = [model(rows(seed)) for seed in range(count)]
    for loss in reversed(losses):
        loss.backward()


@pytest.mark.parametrize(("backend", "count", "loop"), [
    ("modules", 2, one_loss), ("modules", 3, reversed_order), ("regions", 2, reversed_order),
    ("regions", 3, one_loss),
])  # fmt: skip
def test_several_passes_are_said_with_their_bytes(backend, count, loop):
    planned, model = planned_and_plain(backend)
    step = planned.sn_memory.latest
    expected = peak_of_several(planned, step, {step: count - 1})
    with (
        pytest.warns(PlanWarning, match="2 forward passes of Looks come before") as seen,
        AllocationTracker([*planned.parameters()], kernels=True) as tracker,
    ):
        loop(planned, count)
    assert [warned.filename for warned in seen] == [__file__]
    assert tracker.peak_bytes > planned.sn_memory.budget_bytes
    largest = max(param.nbytes for param in model.parameters())
    assert 0.9 * (expected - largest) <= tracker.peak_bytes <= expected
    loop(model, count)
    assert same(grads(planned), grads(model))


@BY_PARTS
def test_with_room_for_all_passes_nothing_is_said(backend):
    one_loss(plan(Looks(2, layers), rows(), "400%", backend=backend, **SETTINGS), 2)


@BY_PARTS
def test_a_graph_that_is_kept_is_said_with_its_bytes(backend):
    planned, model = planned_and_plain(backend)
    step, budget = planned.sn_memory.latest, planned.sn_memory.budget_bytes

    def run(model):
        loss = model(rows())
        loss.backward(retain_graph=True)
        loss.backward()

    with AllocationTracker([*planned.parameters()], kernels=True) as tracker:
        planned(rows()).backward()
    once = tracker.peak_bytes
    planned.zero_grad()
    with (
        pytest.warns(PlanWarning, match=r"keeps its graph \(retain_graph=True\)") as seen,
        AllocationTracker([*planned.parameters()], kernels=True) as tracker,
    ):
        run(planned)
    assert [warned.filename for warned in seen] == [__file__]
    assert once <= budget
    assert once < tracker.peak_bytes <= step.plan.peak_bytes + step.waiting_bytes[0]
    run(model)
    assert same(grads(planned), grads(model))
    run(planned)  # it is said once


def fails(loss):
    raise ValueError("no")


@pytest.mark.parametrize(("backend", "net"), [("modules", ReturnsObject), ("regions", Looks)])
def test_passes_that_ended_do_not_wait(backend, net):
    """Losses that are held, dropped, detached or lost by an exception; passes without gradients."""
    planned, _ = planned_and_plain(backend, net=net)
    step = planned.sn_memory.latest

    def loss_of(seed=0):
        returned = planned(rows(seed))
        return getattr(returned, "loss", returned)

    held = []
    for seed in range(3):
        held.append(loss_of(seed))
        assert step.waiting == 1
        held[-1].backward()
        planned.zero_grad()
    for _ in range(2):
        held.append(loss_of())
        grad(held[-1], list(planned.parameters()))
    held += [loss_of().detach() for _ in range(2)]
    loss_of()
    with torch.no_grad():
        held += [loss_of() for _ in range(2)]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            fails(loss_of())
        gc.collect()
    assert step.waiting == 0
    loss_of().backward()


def test_inside_of_a_checkpoint_nothing_waits():
    """It keeps nothing for the backward pass, and runs all of it again there."""
    models = planned_and_plain("modules")
    inputs = [rows(seed).requires_grad_() for seed in range(3)]
    for model in models:
        checkpoint = torch.utils.checkpoint.checkpoint
        sum(checkpoint(model, x, use_reentrant=False) for x in inputs).backward()
    assert same(*map(grads, models))


def test_gradients_of_gradients_are_beyond_the_budget():
    planned, model = planned_and_plain("modules")

    def run(model):
        x = rows().requires_grad_()
        (gradient,) = grad(model(x), x, create_graph=True)
        gradient.square().sum().backward()

    with pytest.warns(PlanWarning, match="create_graph=True") as seen:
        run(planned)
    assert len(seen) == 1
    run(model)
    assert same(grads(planned), grads(model))


# A graph of ops that is kept


def planned_mlp():
    """An MLP by a plan of ops, whose kept graphs are no news, the model and a sample."""
    model, sample = mlp(), torch.randn(16, WIDTH)
    planned = plan(copy.deepcopy(model), sample, "100%", backend="graph", **SETTINGS)
    planned.sn_memory.inputs.warned.add("retained")
    return planned, model, sample


def passes(model, sample):
    """Two backward passes by some parameters each, then one by all, and one more of the rest."""
    torch.manual_seed(2)
    model.zero_grad()
    out = model(sample)
    parameters = list(model.parameters())
    first = grad(out.square().sum(), parameters[-2:], retain_graph=True)
    second = grad(out.sum(), parameters[:2], retain_graph=True)
    out.cos().sum().backward(retain_graph=True)
    out.sin().sum().backward()
    return [*first, *second, *grads(model), *model.buffers()]


@pytest.mark.parametrize(
    ("budget", "techniques"),
    [("100%", ("keep",)), ("60%", ("keep", "recompute")), ("60%", ("keep", "offload"))],
)
@pytest.mark.filterwarnings("ignore:a backward pass through:sn_memory.base.errors.PlanWarning")
def test_every_pass_is_torchs(budget, techniques):
    """Recomputed or moved to the host, in place, with dropout and statistics."""
    model, sample = Everything(), images()
    settings = {"backend": "graph", "techniques": techniques, **SETTINGS}
    planned = plan(copy.deepcopy(model), sample, budget, **settings)
    for _ in range(2):
        assert same(passes(planned, sample), passes(model, sample))


def test_rows_of_a_jacobian_hold_no_more_each():
    """Passes that reach some parameters only leave nothing behind."""
    planned, model, sample = planned_mlp()
    first, *_, last = planned.parameters()
    out = planned(sample)
    held = set()
    for row in range(6):
        with StorageTracker([*planned.parameters(), sample], device=sample.device) as tracker:
            grad(out[0, row], last, retain_graph=True)
        held.add(tracker.live_bytes)
    assert len(held) == 1
    assert same(grad(out.sum(), first), grad(model(sample).sum(), next(model.parameters())))


def test_what_is_kept_goes_with_the_graph():
    planned, _, sample = planned_mlp()
    out = planned(sample)
    out.sum().backward(retain_graph=True)
    (memory,) = planned.sn_memory.latest.program._memories
    gone = [weakref.ref(it.untyped_storage()) for it in memory.held if it is not None]
    assert len(gone) > 8
    there = {it.untyped_storage()._cdata for it in (*planned.parameters(), sample)}
    del memory, out
    gc.collect()
    assert all(it() is None or it()._cdata in there for it in gone)


def test_a_warning_says_once_what_is_kept():
    sample = torch.randn(256, WIDTH)
    planned = plan(mlp(), sample, "70%", backend="graph", **SETTINGS)
    with pytest.warns(PlanWarning, match=r"keeps its graph \(retain_graph=True\)") as warned:
        planned(sample).sum().backward(retain_graph=True)
    assert warned[0].filename == __file__
    planned.zero_grad()
    planned(sample).sum().backward(retain_graph=True)


def test_in_the_middle_an_exception_leaves_the_rest_for_another_pass():
    planned, model, sample = planned_mlp()
    out = planned(sample).sum()
    handle = list(planned.parameters())[4].register_hook(fails)
    with pytest.raises(ValueError, match="no"):
        out.backward(retain_graph=True)
    handle.remove()
    planned.zero_grad()
    out.backward()
    model(sample).sum().backward()
    assert same(grads(planned), grads(model))
