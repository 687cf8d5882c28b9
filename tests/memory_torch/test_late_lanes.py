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
from small_models import mlp, most_scratch
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
from sn_memory.torch.trace.record import View
from sn_memory.torch.trace.to_graph import STATE

LINK = Device("link", 1e9, 1e9, 1e9, 1e9, 0.0)


class Several(nn.Module):
    """All kinds of layers; no indices among what waits, as wrong ones would end the process."""

    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv1(x)))
        x = x + torch.relu_(self.norm(self.conv2(dropout(x, 0.5, self.training))))
        x = self.linear(avg_pool2d(x, 2).flatten(2).transpose(1, 2))
        return x + scaled_dot_product_attention(x, x, x)


NETS = {"mlp": (lambda: mlp(8), (64, 32)), "several": (Several, (4, 3, 16, 16))}


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
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) for name, value in left.items() if value is not None
    )


@pytest.mark.parametrize(
    ("net", "budget", "probability"),
    [
        *(("mlp", "100%", it) for it in (0.0, 0.3, 1.0)),
        *(("several", "75%", it) for it in (0.0, 0.3, 1.0)),
    ],
)
def test_any_order_gives_the_same(lanes, net, budget, probability):
    """Random plans that share places on the host; all copies made, whether there is room or not."""
    model, traced, sample, base = planned(net, budget)
    # With copies on the host tensors are counted, and no scratch.
    scratch = max((it.bytes for op in traced.graph.ops for it in op.workspaces), default=0)
    shared = 0
    for seed in range(8):
        made = lanes(probability, seed)
        moved = random_moves(traced, base, seed)
        replay = Replay(traced, replace(moved, peak_bytes=0))
        mine, plain = copy.deepcopy(model), copy.deepcopy(model)
        settings = {"known": replay.known, "ignored": replay.ignored}
        for _ in range(2):
            expected = run(plain, plain, sample)
            got = run(lambda x: replay.run(mine, (x,), {}), mine, sample, **settings)  # noqa: B023
            assert same(got.results, expected.results), seed
            # Where gradients of gradients would start from is kept by who calls the replay.
            start = sum(it.bytes for it in traced.graph.storages if it.name == STATE)
            most = moved.peak_bytes - start
            assert most - scratch <= got.peak_bytes <= most, seed
        (buffers,) = replay.program.free_buffers
        block = buffers.block
        shared += sum(it.block.numel() for it in buffers.buffers.values()) > block.numel()
        # What the plan counts on the host is what is reserved, but for whole multiples of 64.
        counted = carry_out(traced.graph, moved).host_peak_bytes
        assert counted <= block.numel() < counted + 64 * len(buffers.buffers)
    assert shared == 8
    assert not any(it.faults or it.under_way() for it in made)


@pytest.mark.parametrize(("net", "probability"), [("mlp", 0.3), ("several", 0.0)])
def test_a_kept_graph_gives_each_backward_pass_the_same(lanes, net, probability):
    """What is on the host is copied for a pass that keeps the graph; the last uses it up."""
    model, traced, sample, base = planned(net, "75%")
    for seed in range(4):
        made = lanes(probability, seed)
        moved = random_moves(traced, base, seed)
        replay = Replay(traced, replace(moved, peak_bytes=0))
        mine, plain = copy.deepcopy(model), copy.deepcopy(model)
        found = []
        for forward in (lambda x: replay.run(mine, (x,), {}), plain):  # noqa: B023
            torch.manual_seed(7)
            own = list((plain if forward is plain else mine).parameters())
            out = forward(sample)
            some = torch.autograd.grad(out.sum(), own[-1:], retain_graph=True)
            every = torch.autograd.grad(out.square().sum(), own, retain_graph=True)
            found.append([*some, *every, *torch.autograd.grad(out.cos().sum(), own)])
        assert all(map(torch.equal, *found)), seed
        assert len(replay.program.free_buffers) == 1
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
    made = predicted(traced.graph, actions)
    replay = Replay(traced, replace(made, peak_bytes=0))
    settings = {"known": replay.known, "ignored": replay.ignored}
    got = run(lambda x: replay.run(model, (x,), {}), model, sample, **settings)
    assert got.peak_bytes == made.peak_bytes
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
    model, traced, sample, base = planned("mlp", "100%")
    made = lanes(0.0)
    # One more step runs forward, so that some host copies end there.
    replay = Replay(traced, replace(random_moves(traced, base, 3, share=1.0), peak_bytes=0))
    mine, plain = copy.deepcopy(model), copy.deepcopy(model)
    expected = run(plain, plain, sample)
    rows = {"forward": [replay.program.forward], "between": [Row([], Names())]}
    rows["backward"] = [it.row for it in replay.program.backward]
    # All of them now: what runs is written.
    for row, instructions in [(row, row.instructions) for row in rows[where]]:
        for place in range(0, len(instructions) + 1, 7):
            if where == "between":
                replay.run(mine, (sample,), {})
            else:
                for is_checked in (False, True):
                    begin(row, [*instructions[:place], boom, *instructions[place:]])
                    row.is_checked = is_checked
                    with pytest.raises(HookError):
                        run(lambda x: replay.run(mine, (x,), {}), mine, sample)
                begin(row, instructions)
            assert not made[0].faults, place
            assert not made[0].under_way(), place
            got = run(lambda x: replay.run(mine, (x,), {}), mine, sample)
            assert same(got.results, expected.results), place
    # The block is used again: none was made beside it.
    assert len(made) == len(replay.program.free_buffers) == 1


def test_a_buffer_is_written_when_it_has_been_read():
    lanes = OddLanes(0.0)
    host_copies = {
        0: HostCopy(0, 0, 1, 2, 24),
        1: HostCopy(1, 3, 4, 5, 24),
        2: HostCopy(2, 3, 4, 5, 24),
    }
    buffers = OffloadBuffers(host_copies, CopyEngine(torch.device("cpu"), lanes))
    first = torch.arange(6.0)
    buffers.offload(0, first)()
    back, wait = buffers.prefetch(0, View(0, (6,), (1,), 0, torch.float32))
    others = [torch.zeros(6), torch.zeros(6)]
    for host_copy, other in enumerate(others, start=1):
        buffers.offload(host_copy, other)()
    # No op has waited for it; but who writes where it is read from has.
    assert torch.equal(back, first)
    assert buffers.block.numel() == 128
    assert any(it.read for it in buffers.buffers.values())
    wait()
    assert not any(it.read for it in buffers.buffers.values())
    assert not lanes.under_way()


def test_buffers_that_take_more_than_may_be_pinned():
    host_copies = {0: HostCopy(0, 0, 1, 4, 32), 1: HostCopy(1, 1, 2, 4, 32)}
    engine = CopyEngine(torch.device("cpu"))
    assert OffloadBuffers(host_copies, engine, pinned_bytes=128).block.numel() == 128
    with pytest.raises(PlanError, match="take 128 bytes"):
        OffloadBuffers(host_copies, engine, pinned_bytes=127)
