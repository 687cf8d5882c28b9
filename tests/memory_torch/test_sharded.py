"""Planned models on two ranks: under FSDP2 in every order, under TP, and FSDP1 refused by name."""

import json

import pytest
import torch
from two_ranks import run_two_ranks

from sn_memory.torch import StorageTracker

pytest.importorskip("torch.distributed.fsdp")

STEPS = 20
GRAPH, MODULES, AFTER = "planned first, graph", "planned first, modules", "sharded first, auto"
CASES = {
    "whole": [GRAPH, AFTER],
    "whole, resharded": [GRAPH],
    "inner": [GRAPH, MODULES, AFTER],
    "inner only": [GRAPH, AFTER],
    "split": [GRAPH, AFTER],
}
RANK = """
import json, sys, time, warnings, torch
from contextlib import nullcontext
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from small_models import mlp
from sn_memory.torch import StorageTracker, TraceError, plan, verify
torch.set_num_threads(1)
rank, store, steps, cases = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def rows(seed):
    return torch.randn(512, 32, generator=torch.Generator().manual_seed(seed))

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = mlp(6)

    def forward(self, x):
        return self.blocks(x).square().mean()

class Around(nn.Module):
    # Its own parameters are gathered while the planned model is looked at.
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.scale = nn.Linear(32, 32), inner, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (self.inner(self.first(x)) * self.scale).sum()

def whole(model, outer):
    fully_shard(outer, mesh=mesh)

def whole_resharded(model, outer):
    fully_shard(outer, mesh=mesh, reshard_after_forward=True)

def inner(model, outer):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(outer, mesh=mesh)

def inner_only(model, outer):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)

def split(model, outer):
    kinds = (ColwiseParallel, RowwiseParallel)
    parallelize_module(model, mesh, {f"blocks.{at}.0": kinds[at % 2]() for at in range(6)})

def trained(shard, order=None, backend=None, budget=None, around=False):
    torch.manual_seed(0)
    # Under TP, ranks see the same rows.
    apart = 0 if shard is split else rank
    model, asked, settings = WithLoss(), [], {"backend": backend, "profile": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if order == "planned first":
            model = plan(model, rows(apart), budget, planner="sqrt_n", **settings)
        outer = Around(model) if around else model
        shard(model, outer)
        if order == "sharded first":
            held = list(model.parameters())
            hooks = [it.register_post_accumulate_grad_hook(asked.append) for it in held]
            model = outer = plan(model, rows(apart), budget, **settings)
            assert not asked and all(it.grad is None for it in model.parameters())
            for hook in hooks:
                hook.remove()
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1, momentum=0.9)
        losses, peaks = [], []
        for at in range(steps):
            optimizer.zero_grad()
            x = rows(2 * at + apart)
            # In the first step it may be planned anew.
            tracker = StorageTracker([*outer.parameters(), x])
            with tracker if 0 < at < 5 else nullcontext():
                loss = outer(x)
                loss.backward()
            peaks.append(tracker.peak_bytes)
            optimizer.step()
            losses.append(loss.item())
    weights = [it.full_tensor() if hasattr(it, "full_tensor") else it for it in outer.parameters()]
    found = {"losses": losses, "peak": max(peaks)}
    found["weights"] = [it.double().sum().item() for it in weights]
    if backend:
        made = model.sn_memory.plan
        found |= {
            "backend": model.sn_memory.backend,
            "again": len(made.decided("recompute")),
            "budget": made.budget_bytes,
            "predicted": made.peak_bytes,
            "said": [str(it.message) for it in caught if "planned" in str(it.message)],
        }
        if order == "sharded first":
            found["verified"] = verify(model, rows(apart)).equal
    return found

def refused(wrap, order):
    model = mlp(2)
    try:
        if order == "wrapped first":
            plan(wrap(model), rows(0), "100%", profile=False)
        else:
            wrap(plan(model, rows(0), "100%", profile=False))(rows(0))
    except TraceError as error:
        return str(error)

found = {}
ways = {
    "whole": whole, "whole, resharded": whole_resharded, "inner": inner, "inner only": inner_only,
    "split": split,
}
for name, shard in ways.items():
    found[name] = {"plain": trained(shard)}
    for order, backend, budget in (
        ("planned first", "graph", "80%"),
        # Modules are chosen by what a step held when it was measured, and on a busy machine Gloo's
        # thread holds a buffer for longer: 83 % were needed once.
        ("planned first", "modules", "90%"),
        ("sharded first", "auto", "90%"),
    ):
        if f"{order}, {backend}" in cases[name]:
            found[name][f"{order}, {backend}"] = trained(shard, order, backend, budget)
found["around"] = {
    "plain": trained(inner, around=True),
    "planned first, graph": trained(inner, "planned first", "graph", "80%", around=True),
}
for order in ("wrapped first", "planned first"):
    for as_they_are in (False, True):
        def wrap(model):
            device = torch.device("cpu")
            return FullyShardedDataParallel(model, use_orig_params=as_they_are, device_id=device)
        found[f"{order}, {as_they_are}"] = refused(wrap, order)
print(json.dumps(found))
time.sleep(0.2)  # docs/ddp.md says why
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(RANK, tmp_path_factory.mktemp("ranks") / "store", STEPS, json.dumps(CASES))


# Gloo's thread may hold a buffer for a moment longer: all parameters gathered, or the sum of a
# block's results.
HELD = dict.fromkeys(CASES, 6 * (32 * 32 + 32) * 4) | {"split": 512 * 32 * 4}
# Per way, what carries out a plan of ops that was made before.
CARRIED = dict.fromkeys(CASES, "modules") | {"whole": "graph", "whole, resharded": "graph"}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "planned"), [(way, it) for way in CASES for it in CASES[way]])
def test_bits_and_peaks(ranks, way, planned):
    for found in ranks:
        plain, mine = found[way]["plain"], found[way][planned]
        assert len(mine["losses"]) == STEPS
        assert mine["losses"] == plain["losses"]
        assert mine["weights"] == plain["weights"]
        assert mine["again"]
        assert mine["predicted"] <= mine["budget"]
        assert mine["peak"] <= mine["budget"] + HELD[way]
        assert mine["peak"] < plain["peak"]
        # Each rank runs the same modules again, or their collectives would part.
        assert mine["again"] == ranks[0][way][planned]["again"]
        assert mine["budget"] == ranks[0][way][planned]["budget"]


@pytest.mark.slow
@pytest.mark.parametrize("way", CASES)
def test_what_ran_is_said(ranks, way):
    for found in ranks:
        first = found[way][GRAPH]
        assert first["backend"] == CARRIED[way]
        if CARRIED[way] == "graph":
            assert first["said"] == []
        else:
            (said,) = first["said"]
            assert "planned by modules from now on" in said
            assert "sharded after planning" in said
            assert "fully_shard(model)" in said
        if MODULES in found[way]:
            assert found[way][MODULES]["said"] == []
        if AFTER not in found[way]:
            continue
        after = found[way][AFTER]
        assert after["backend"] == "modules"
        assert after["verified"]
        (said,) = after["said"]
        assert "a DTensor of shape" in said


@pytest.mark.slow
def test_planned_anew_inside_a_sharded_forward_pass(ranks):
    for found in ranks:
        plain, mine = found["around"]["plain"], found["around"][GRAPH]
        assert mine["backend"] == "modules"
        assert mine["losses"] == plain["losses"]
        assert mine["weights"] == plain["weights"]
        assert mine["peak"] < plain["peak"]


@pytest.mark.slow
@pytest.mark.parametrize("as_they_are", [False, True])
@pytest.mark.parametrize("order", ["wrapped first", "planned first"])
def test_the_first_fsdp_is_refused_by_name(ranks, order, as_they_are):
    said = ranks[0][f"{order}, {as_they_are}"]
    assert "FullyShardedDataParallel" in said
    assert "torch.distributed.fsdp.fully_shard" in said


def test_the_tracker_sees_storages_resized():
    """As FSDP2 does with what it gathers: freed and taken again, beside all ops."""
    x = torch.zeros(1000)
    with StorageTracker([x]) as tracker:
        y = x + 1
        y.untyped_storage().resize_(0)
        assert tracker.live_bytes == 4000
        y.untyped_storage().resize_(8000)
        assert tracker.live_bytes == 12000
        y.resize_(3000)
        assert tracker.live_bytes == 16000
        del y
        assert tracker.live_bytes == 4000
    assert tracker.peak_bytes == 16000
