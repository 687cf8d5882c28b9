"""Planned models inside DistributedDataParallel on two ranks: bits, peaks, what DDP sees when."""

import pytest
from two_ranks import END, START, run_two_ranks

STEPS = 20
RANK = (
    START
    + """
from torch.nn.parallel import DistributedDataParallel

def trained(backend=None, **settings):
    torch.manual_seed(0)
    # Without being told of it, DDP waits for the gradient of one that is not used.
    model, arrived, buckets = WithLoss("find_unused_parameters" in settings), [], []
    if backend:
        given = {"profile": False, "backend": backend}
        if backend == "graph":
            given["planner"] = "sqrt_n"
        model = plan(model, rows(512, rank), "80%", **given)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004, **settings)
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

    def begin():
        arrived.clear()
        buckets.clear()

    found = train(wrapped, begin=begin) | {"arrived": arrived, "buckets": buckets}
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
print(json.dumps(found))
"""
    + END
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(RANK, tmp_path_factory.mktemp("ranks") / "store", STEPS)


CASES = [("default", it) for it in ("graph", "views")]
CASES += [(way, it) for way in ("static graph", "unused") for it in ("graph", "modules")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "planned"), CASES)
def test_bits_peaks_and_no_gradient_later_than_torch_hands_it_over(ranks, way, planned):
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
        assert sorted(mine["arrived"]) == sorted(plain["arrived"])
        # Layer by layer as torch; those of one op, weight and bias, in either order.
        layers, theirs = ([it.rpartition(".")[0] for it in run["arrived"]] for run in (mine, plain))
        assert layers == theirs
        assert len(mine["buckets"]) == len(plain["buckets"]) > 2
        pairs = zip(mine["buckets"], plain["buckets"], strict=True)
        assert all(sent <= as_torch for sent, as_torch in pairs)
