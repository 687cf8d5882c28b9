"""Plans of regions on two ranks, whose paths differ from step to step and between the ranks."""

import json

import pytest
from two_ranks import END, START, run_two_ranks

STEPS = 8
WAYS = {
    "drops": ("Drops", {"find_unused_parameters": True}),
    "drops, accumulated": ("Drops", {"find_unused_parameters": True, "accumulate": True}),
    "experts": ("Experts", {"find_unused_parameters": True}),
    "masks, views": ("Masks", {"gradient_as_bucket_view": True}),
    "looks, static": ("Looks", {"static_graph": True}),
}
RANK = (
    START
    + """
import region_models, warnings
from region_models import rows
from steps import grads
from torch.nn.parallel import DistributedDataParallel
from sn_memory.torch.model.tracker import AllocationTracker
warnings.simplefilter("ignore")
ways = json.loads(sys.argv[4])

def sums(tensors):
    return [None if it is None else it.double().sum().item() for it in tensors]

def trained(kind, planned, accumulate=False, **settings):
    torch.manual_seed(0)
    model = getattr(region_models, kind)()
    if planned:
        # Each rank plans on a batch of its own.
        model = plan(model, rows(rank), "70%", backend="regions", profile=False, time_limit_s=6.0)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results, peaks = [], []
    for at in range(steps):
        # What is left out differs between the ranks and from step to step.
        torch.manual_seed(2 * at + rank)
        optimizer.zero_grad()
        x = rows(2 * at + rank)
        with AllocationTracker([*model.parameters(), x], kernels=True) as tracker:
            if accumulate:
                with wrapped.no_sync():
                    wrapped(rows(2 * at + rank + 100)).backward()
            loss = wrapped(x)
            loss.backward()
        peaks.append(tracker.peak_bytes)
        results.append([loss.item(), *sums(grads(model))])
        optimizer.step()
    found = {"results": results, "peaks": peaks, "weights": sums(model.parameters())}
    if planned:
        found["calls"] = len(model.sn_memory.latest.chosen.calls)
    return found

found = {
    name: [trained(kind, planned, **settings) for planned in (False, True)]
    for name, (kind, settings) in ways.items()
}
print(json.dumps(found))
"""
    + END
)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    return run_two_ranks(RANK, store, STEPS, json.dumps(WAYS), timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_under_ddp_steps_are_those_of_the_model(replicas, way):
    for found in replicas:
        plain, mine = found[way]
        assert len(mine["results"]) == STEPS
        assert mine["calls"]
        assert mine["results"] == plain["results"]
        assert mine["weights"] == plain["weights"] == replicas[0][way][1]["weights"]
        assert max(mine["peaks"]) < max(plain["peaks"])


@pytest.mark.slow
def test_ranks_take_paths_of_their_own(replicas):
    first, second = (found["drops"][0]["peaks"] for found in replicas)
    assert first != second
