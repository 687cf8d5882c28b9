"""Passes that wait, where parts were measured: by modules and by regions, as by a graph.

Several forward passes before one backward pass, and a backward pass that keeps its graph, take more
than the step that was measured. Where that is more than the budget a warning says so beforehand,
with the bytes; a loop that does neither hears nothing.
"""

import copy
import gc
from functools import cache

import pytest
import torch
from steps import grads, same
from torch import nn

from sn_memory.torch import PlanWarning, plan
from sn_memory.torch.accumulation import peak_of_several
from sn_memory.torch.model.tracker import AllocationTracker

WIDTH, ROWS = 32, 512
SETTINGS = {"profile": False, "time_limit_s": 1.0}


class Looks(nn.Module):
    """Looks at a value after each block, so that it does not trace whole."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
            if x.mean().item() > 1e6:
                break
        return x.square().mean()


class InObject:
    def __init__(self, loss):
        self.loss = loss


class ReturnsObject(Looks):
    def forward(self, x):
        return InObject(super().forward(x))


def rows(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@cache
def made(backend, net):
    model = net()
    planned = plan(copy.deepcopy(model), rows(), "70%", backend=backend, **SETTINGS)
    assert planned.sn_memory.plan.decided("recompute")
    return planned, model


def planned_and_plain(backend, net=Looks):
    """As if planned for each test; that takes seconds."""
    planned, model = made(backend, net)
    for it in made(backend, net):
        it.zero_grad()
    planned.sn_memory.inputs.warned.clear()
    for step in planned.sn_memory.inputs.every:
        step.warned.clear()
    return planned, model


def one_loss(model, count):
    """As a GAN's critic of real and of made rows, or a contrastive loss of several views."""
    sum(model(rows(seed)) for seed in range(count)).backward()


def turned_round(model, count):
    losses = [model(rows(seed)) for seed in range(count)]
    for loss in reversed(losses):
        loss.backward()


@pytest.mark.parametrize("loop", [one_loss, turned_round])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("backend", ["modules", "regions"])
def test_several_passes_are_said_with_their_bytes(backend, count, loop):
    planned, model = planned_and_plain(backend)
    record = planned.sn_memory
    step = record.latest
    said = peak_of_several(planned, step, {step: count - 1})
    with (
        pytest.warns(PlanWarning, match="2 forward passes of Looks come before") as seen,
        AllocationTracker([*planned.parameters()], kernels=True) as tracker,
    ):
        loop(planned, count)
    assert [warned.filename for warned in seen] == [__file__]
    assert tracker.peak_bytes > record.budget_bytes
    largest = max(param.nbytes for param in model.parameters())
    assert 0.9 * (said - largest) <= tracker.peak_bytes <= said
    loop(model, count)
    assert same(grads(planned), grads(model))


@pytest.mark.parametrize("backend", ["modules", "regions"])
def test_with_room_for_all_passes_nothing_is_said(backend):
    roomy = plan(Looks(), rows(), "400%", backend=backend, **SETTINGS)
    one_loss(roomy, 2)


@pytest.mark.parametrize("backend", ["modules", "regions"])
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


@pytest.mark.parametrize("net", [Looks, ReturnsObject])
@pytest.mark.parametrize("backend", ["modules", "regions"])
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
        torch.autograd.grad(held[-1], list(planned.parameters()))
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


def fails(loss):
    raise ValueError("no")


def test_inside_of_a_checkpoint_nothing_waits():
    """It keeps nothing for the backward pass, and runs all of it again there."""
    planned, model = planned_and_plain("modules")
    inputs = [rows(seed).requires_grad_() for seed in range(3)]

    def run(model):
        checkpoint = torch.utils.checkpoint.checkpoint
        sum(checkpoint(model, x, use_reentrant=False) for x in inputs).backward()

    run(planned)
    run(model)
    assert same(grads(planned), grads(model))


def test_gradients_of_gradients_are_beyond_the_budget():
    planned, model = planned_and_plain("modules")

    def run(model):
        x = rows().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        gradient.square().sum().backward()

    with pytest.warns(PlanWarning, match="create_graph=True") as seen:
        run(planned)
    assert len(seen) == 1
    run(model)
    assert same(grads(planned), grads(model))
