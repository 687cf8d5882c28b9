"""Planned models inside DistributedDataParallel on two ranks: bits, peaks, what DDP sees when."""

import pytest
from two_ranks import run_two_ranks

STEPS = 20
RANK = """
import importlib.util, json, os, sys, time, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from small_models import mlp
from sn_memory.torch import StorageTracker, plan
torch.set_num_threads(1)
rank, store, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def rows(seed):
    return torch.randn(512, 32, generator=torch.Generator().manual_seed(seed))

class WithLoss(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.blocks = mlp(6)
        if unused:
            self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.blocks(x).square().mean()

def trained(backend=None, **settings):
    torch.manual_seed(0)
    # Without being told of it, DDP waits for the gradient of one that is not used.
    model, arrived, buckets = WithLoss("find_unused_parameters" in settings), [], []
    if backend:
        given = {"profile": False, "backend": backend}
        if backend == "graph":
            given["planner"] = "sqrt_n"
        model = plan(model, rows(rank), "80%", **given)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for name, it in model.named_parameters():
        it.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))

    def hook(state, bucket):
        # How many gradients there were when DDP sent it.
        buckets.append(len(arrived))
        torch.distributed.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / 2)
        return future

    wrapped.register_comm_hook(None, hook)
    losses = []
    for at in range(steps):
        x = rows(2 * at + rank)
        optimizer.zero_grad()
        arrived.clear()
        buckets.clear()
        tracker = StorageTracker([*model.parameters(), x])
        if at == steps - 1:
            with tracker:
                loss = wrapped(x)
                loss.backward()
        else:
            loss = wrapped(x)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {"losses": losses, "peak": tracker.peak_bytes, "arrived": arrived, "buckets": buckets}
    found["weights"] = [it.double().sum().item() for it in model.parameters()]
    if backend:
        made = model.sn_memory.plan
        found |= {"again": len(made.decided("recompute")), "budget": made.budget_bytes}
    return found

variants = {
    "default": {}, "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
found = {}
for name, settings in variants.items():
    found[name] = {"plain": trained(**settings), "graph": trained("graph", **settings)}
    if name == "default":
        # Views of DDP's buckets as gradients.
        found[name]["views"] = trained("graph", gradient_as_bucket_view=True)
    else:
        found[name]["modules"] = trained("modules", **settings)

def accelerated(planned):
    from accelerate import Accelerator
    torch.manual_seed(0)
    model = WithLoss(False)
    if planned:
        model = plan(model, rows(rank), "80%", backend="graph", planner="sqrt_n", profile=False)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for at in range(steps):
        optimizer.zero_grad()
        loss = wrapped(rows(2 * at + rank))
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    weights = [it.double().sum().item() for it in model.parameters()]
    return [type(wrapped).__name__, losses, weights]

if importlib.util.find_spec("accelerate"):
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= {name: str(number) for name, number in here.items()}
    found["accelerate"] = [accelerated(False), accelerated(True)]
print(json.dumps(found))
time.sleep(0.2)  # docs/ddp.md says why
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(RANK, tmp_path_factory.mktemp("ranks") / "store", STEPS)


CASES = [("default", it) for it in ("graph", "views")]
CASES += [(way, it) for way in ("static graph", "unused") for it in ("graph", "modules")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "planned"), CASES)
def test_bits_and_peaks(ranks, way, planned):
    for found in ranks:
        plain, mine = found[way]["plain"], found[way][planned]
        assert len(mine["losses"]) == STEPS
        assert mine["losses"] == plain["losses"]
        assert mine["weights"] == plain["weights"] == ranks[0][way]["plain"]["weights"]
        assert mine["again"]
        # DDP's buckets are its own, and in no plan: all gradients once more.
        gradients = 6 * (32 * 32 + 32) * 4
        assert mine["peak"] <= mine["budget"] + gradients
        assert mine["peak"] < plain["peak"]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "planned"), CASES)
def test_no_gradient_later_than_torch_hands_it_over(ranks, way, planned):
    for found in ranks:
        plain, mine = found[way]["plain"], found[way][planned]
        assert sorted(mine["arrived"]) == sorted(plain["arrived"])
        # Layer by layer as torch; those of one op, weight and bias, in either order.
        layers, theirs = ([it.rpartition(".")[0] for it in run["arrived"]] for run in (mine, plain))
        assert layers == theirs
        assert len(mine["buckets"]) == len(plain["buckets"]) > 2
        pairs = zip(mine["buckets"], plain["buckets"], strict=True)
        assert all(sent <= as_torch for sent, as_torch in pairs)


@pytest.mark.slow
def test_accelerate_on_two_ranks(ranks):
    pytest.importorskip("accelerate")
    for found in ranks:
        plain, mine = found["accelerate"]
        assert mine[0] == "DistributedDataParallel"
        assert len(mine[1]) == STEPS
        assert mine == plain
