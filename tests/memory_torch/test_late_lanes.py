"""Copies to the host and back in any order that is allowed: never another result.

On the CPU copies are done when they are asked for, so a wait that is missing is never missed there.
These lanes find it: see late_lanes.py.
"""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from late_lanes import OddLanes, predicted, random_moves
from small_models import Everything, mlp, most_scratch
from steps import same as equal
from torch import nn
from torch.nn.functional import avg_pool2d, dropout, scaled_dot_product_attention

from sn_memory import Device, PlanError, plan_graph
from sn_memory.check import carry_out
from sn_memory.plan.plan import Action
from sn_memory.torch import plan, trace, verify
from sn_memory.torch.eager.instructions import Names, Row
from sn_memory.torch.eager.replay import Replay
from sn_memory.torch.host import copies
from sn_memory.torch.host.copies import CopyEngine, HostCopy, OffloadBuffers
from sn_memory.torch.model.step import run_step
from sn_memory.torch.trace.to_graph import STATE

LINK = Device("link", 1e9, 1e9, 1e9, 1e9, 0.0)


class Several(Everything):
    """All kinds of layers; no indices among what waits, as wrong ones would end the process."""

    def __init__(self):
        super().__init__()
        del self.layer_norm

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv1(x)))
        x = x + torch.relu_(self.norm(self.conv2(dropout(x, 0.5, self.training))))
        x = self.linear(avg_pool2d(x, 2).flatten(2).transpose(1, 2))
        return x + scaled_dot_product_attention(x, x, x)


NETS = {"mlp": (mlp, (64, 32)), "several": (Several, (4, 3, 16, 16))}


@functools.cache
def planned(net, budget):
    """A model, its trace, a sample, and a plan without host copies."""
    make, shape = NETS[net]
    torch.manual_seed(0)
    model, sample = make(), torch.randn(shape)
    traced = trace(model, sample, profile=False, device=LINK)
    return model, traced, sample, plan_graph(traced.graph, budget, planner="sqrt_n")


@pytest.fixture
def lanes(monkeypatch):
    """Lanes of a probability, in the place of plain copies; returns those that were made."""
    made = []

    def use(probability, seed=0):
        def lanes_for(device):
            made.append(OddLanes(probability, seed))
            return made[-1]

        monkeypatch.setattr(copies, "lanes_for", lanes_for)
        return made

    return use


def run(forward, model, sample, **settings):
    torch.manual_seed(7)
    return run_step(forward, model, ((sample,), {}), **settings)


def same(left, right):
    return left.keys() == right.keys() and equal(left.values(), right.values())


def replayed(moved, net, budget):
    """A replay of a plan, which moves whether there is room or not, a model for it, and another."""
    model, traced, _, _ = planned(net, budget)
    replay = Replay(traced, replace(moved, peak_bytes=0))
    mine = copy.deepcopy(model)
    return replay, lambda x: replay.run(mine, (x,), {}), mine, copy.deepcopy(model)


def of_a_kept_graph(forward, model, sample):
    """What is on the host is copied for a pass that keeps the graph; the last uses it up."""
    torch.manual_seed(7)
    own = list(model.parameters())
    out = forward(sample)
    some = torch.autograd.grad(out.sum(), own[-1:], retain_graph=True)
    every = torch.autograd.grad(out.square().sum(), own, retain_graph=True)
    return [*some, *every, *torch.autograd.grad(out.cos().sum(), own)]


@pytest.mark.parametrize(
    ("net", "budget", "probability"),
    [("mlp", "100%", 0.0), ("mlp", "100%", 0.3), ("several", "75%", 0.3), ("several", "75%", 1.0)],
)
def test_any_order_gives_the_same(lanes, net, budget, probability):
    """Random plans that share places on the host; all copies made, whether there is room or not."""
    _, traced, sample, base = planned(net, budget)
    # With copies on the host tensors are counted, and no scratch.
    scratch = max((it.bytes for op in traced.graph.ops for it in op.workspaces), default=0)
    shared = 0
    for seed in range(5):
        made = lanes(probability, seed)
        moved = random_moves(traced, base, seed)
        replay, forward, mine, plain = replayed(moved, net, budget)
        settings = {"known": replay.known, "ignored": replay.ignored}
        for _ in range(2):
            expected = run(plain, plain, sample)
            got = run(forward, mine, sample, **settings)
            assert same(got.results, expected.results), seed
            # Where gradients of gradients would start from is kept by who calls the replay.
            start = sum(it.bytes for it in traced.graph.storages if it.name == STATE)
            most = moved.peak_bytes - start
            assert most - scratch <= got.peak_bytes <= most, seed
        found = of_a_kept_graph(forward, mine, sample)
        assert equal(found, of_a_kept_graph(plain, plain, sample)), seed
        (buffers,) = replay.program.free_buffers
        block = buffers.block
        shared += sum(it.block.numel() for it in buffers.buffers.values()) > block.numel()
        # What the plan counts on the host is what is reserved, but for whole multiples of 64.
        counted = carry_out(traced.graph, moved).host_peak_bytes
        assert counted <= block.numel() < counted + 64 * len(buffers.buffers)
    assert shared == 5
    assert not any(it.faults or it.under_way() for it in made)


@pytest.mark.parametrize("net", list(NETS))
def test_plans_of_the_planner(lanes, net):
    """Two budgets, a slow link and a fast one, as users ask for them."""
    made = lanes(0.0)
    make, shape = NETS[net]
    model, sample = make(), torch.randn(shape)
    techniques = ("keep", "recompute", "offload")
    for speed, budget in ((1e8, "75%"), (1e9, "85%")):
        link = Device("link", 1e9, 1e9, speed, speed, 0.0)
        ours = plan(model, sample, budget, techniques=techniques, device=link, profile=False)
        assert ours.sn_memory.latest.program.host_copies
        found = verify(ours, sample)
        assert found.equal, found.different
        # With copies on the host tensors are counted, and no scratch.
        least = found.predicted_peak_bytes - most_scratch(ours)
        assert least <= found.measured_peak_bytes <= found.predicted_peak_bytes
    assert not any(it.faults or it.under_way() for it in made)


def test_what_is_on_the_host_is_not_held_when_it_is_made_again():
    """An op runs again for one of its outputs while another is away: that one is dropped."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
    sample = torch.randn(64, 32)
    traced = trace(model, sample, profile=False, device=LINK)
    norm = next(it for it in traced.graph.ops if it.kind == "native_layer_norm")
    out, mean, _ = norm.outputs
    actions = []
    for action in plan_graph(traced.graph, "100%", planner="liveness").actions:
        ran = action.kind == "run"
        op = traced.graph.ops[traced.graph.op_index[action.target]] if ran else None
        if op is not None and op.phase == "backward" and out in op.inputs:
            actions.append(Action("prefetch", out))
        actions.append(action)
        if op is norm:
            actions.append(Action("free", mean))
        elif op is not None and op.phase == "forward" and out in op.inputs:
            actions += [Action("offload", out), Action("free", out), Action("run", norm.name)]
    expected = predicted(traced.graph, actions)
    replay = Replay(traced, replace(expected, peak_bytes=0))
    settings = {"known": replay.known, "ignored": replay.ignored}
    got = run(lambda x: replay.run(model, (x,), {}), model, sample, **settings)
    assert got.peak_bytes == expected.peak_bytes
    assert same(got.results, run(model, model, sample).results)


class HookError(Exception):
    pass


def boom(memory):
    raise HookError


def begin(row, instructions):
    """Let a row be as one that has not run."""
    row.__init__(instructions, row.names)


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_step_that_ends_early_leaves_no_copy_behind(lanes, where):
    """An exception at any instruction, or no backward pass: the next step is as ever."""
    _, traced, sample, base = planned("mlp", "100%")
    made = lanes(0.0)
    # One more step runs forward, so that some host copies end there.
    moved = random_moves(traced, base, 3, share=1.0)
    replay, forward, mine, plain = replayed(moved, "mlp", "100%")
    expected = run(plain, plain, sample)
    rows = {"forward": [replay.program.forward], "between": [Row([], Names())]}
    rows["backward"] = [it.row for it in replay.program.backward]
    # All of them now: what runs is written.
    for row, instructions in [(row, row.instructions) for row in rows[where]]:
        for place in range(0, len(instructions) + 1, 11):
            if where == "between":
                forward(sample)
            else:
                for is_checked in (False, True):
                    begin(row, [*instructions[:place], boom, *instructions[place:]])
                    row.is_checked = is_checked
                    with pytest.raises(HookError):
                        run(forward, mine, sample)
                begin(row, instructions)
            assert not made[0].faults, place
            assert not made[0].under_way(), place
            got = run(forward, mine, sample)
            assert same(got.results, expected.results), place
    # The block is used again: none was made beside it.
    assert len(made) == len(replay.program.free_buffers) == 1


def test_buffers_that_take_more_than_may_be_pinned():
    host_copies = {0: HostCopy(0, 0, 1, 4, 32), 1: HostCopy(1, 1, 2, 4, 32)}
    engine = CopyEngine(torch.device("cpu"))
    assert OffloadBuffers(host_copies, engine, pinned_bytes=128).block.numel() == 128
    with pytest.raises(PlanError, match="take 128 bytes"):
        OffloadBuffers(host_copies, engine, pinned_bytes=127)
