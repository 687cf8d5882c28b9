"""The pool of what leaves the device: places, order of copies, and copies that need not be made."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import mlp, module_of
from steps import exact
from torch import nn

from sn_memory import Device
from sn_memory.torch import plan
from sn_memory.torch.host.copies import HostCopy, unneeded


def host_copies(rows):
    return [HostCopy(at, max(0, row[0] - 1), *row) for at, row in enumerate(rows)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_stays_never_raises_the_peak(data):
    live = np.array(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=12)))
    steps = st.integers(0, len(live))
    rows = data.draw(st.lists(st.tuples(steps, steps, st.integers(1, 9)), max_size=8))
    rows = [(min(first, last), max(first, last), size) for first, last, size in rows]
    before = live.copy()
    stay = unneeded(host_copies(rows), live, int(live.max()))
    assert (live == before).all()
    for at in stay:
        live[rows[at][0] : rows[at][1]] += rows[at][2]
    assert live.max() == before.max()


LINK = Device("slow link", 1e9, 1e9, 1e8, 1e8, 0.0)
MOVES = {"techniques": ("keep", "offload"), "device": LINK, "profile": False}


def test_copies_back_start_ahead_of_their_use():
    """Ops run in between; that each is awaited is in test_late_lanes.py."""
    record = plan(mlp(8), torch.randn(64, 32), "75%", **MOVES).sn_memory
    ends = [it.end for it in record.latest.program.made_copies.values()]
    assert any(it.kind == "run" for end in ends for it in record.plan.actions[end + 1 : end + 3])


def test_nothing_moves_while_all_fits():
    """A plan that moves more than its peak needs: what there is room for stays."""
    model, sample = mlp(6), torch.randn(64, 32)
    planned = plan(model, sample, "80%", **MOVES)
    step = planned.sn_memory.latest
    asked = sum(it.kind == "offload" for it in step.plan.actions)
    copies = step.program.host_copies
    assert len(copies) == asked
    live = np.zeros(len(step.plan.actions), dtype=np.int64)
    assert unneeded(copies, live, 10**12) == set(range(asked))
    exact(planned, sample)


@pytest.mark.parametrize(("planner", "budget"), [("auto", "92%"), ("superneurons", "100%")])
def test_what_the_caller_holds_stays(planner, budget):
    """Of a large, early output, which waits for all layers behind, a plan once moved the memory."""

    def forward(self, x):
        wide = self.first(x)
        x = self.narrow(wide)
        for layer in self.rest:
            x = torch.tanh(layer(x) * torch.sigmoid(x))
        return wide, x

    rest = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    model = module_of(forward, first=nn.Linear(32, 512), narrow=nn.Linear(512, 64), rest=rest)
    sample = torch.randn(128, 32)
    planned = plan(model, sample, budget, backend="graph", planner=planner, **MOVES)
    step = planned.sn_memory.plan
    moved = {it.target for it in step.actions if it.kind == "offload"}
    held = {it.name for it in planned.sn_memory.trace.graph.storages if it.held}
    assert {"first/addmm#0", "gradient of output 0", "gradient of output 1"} < held
    assert not moved & held
    assert bool(moved) == (planner == "auto")
    exact(planned, sample)
