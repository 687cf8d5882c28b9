"""Gradients that are handed over as they become ready: same bits, hooks once, ranks end equal."""

import copy
import json
from pathlib import Path

import pytest
import torch
from small_models import Everything, images, maps_then_weights, mlp
from steps import same

from sn_memory.torch import plan, verify

SETTINGS = {"profile": False, "planner": "sqrt_n"}


def test_bits_are_the_same_and_those_of_inputs_come_as_ever(among_ranks):
    among_ranks()
    model, sample = Everything(), images().requires_grad_()
    planned = plan(copy.deepcopy(model), sample, "75%", **SETTINGS)
    found = verify(planned, sample)
    assert found.equal
    # Eight bytes more at the loss: the number by which autograd finds the step, and its gradient.
    assert found.measured_peak_bytes - found.predicted_peak_bytes in (0, 8)
    results = []
    for it in (planned, model):
        torch.manual_seed(3)
        sample.grad = None
        optimizer = torch.optim.SGD(it.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            it(sample).square().mean().backward()
            optimizer.step()
        results.append([*it.state_dict().values(), sample.grad])
    assert same(*results)


def test_gradients_become_ready_while_the_backward_pass_runs(among_ranks):
    """Those of the last layer first, and long before the first layer's are computed."""
    among_ranks()
    model, sample = mlp(6), torch.randn(64, 32)
    names, ready = [], []

    def hook(name):
        names.append(name)
        ready.append(sum(it.grad is not None for it in model.parameters()))

    for name, it in model.named_parameters():
        it.register_post_accumulate_grad_hook(lambda _, name=name: hook(name))
    plan(model, sample, "80%", **SETTINGS)(sample).sum().backward()
    layers = [int(name.partition(".")[0]) for name in names]
    assert layers == sorted(layers, reverse=True)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert ready[:2] == [1, 2]


def test_an_order_that_holds_less_where_the_budget_asks_for_it(among_ranks):
    """On ranks gradients come early if a plan of that keeps the budget, and late if none."""
    model, sample = maps_then_weights(), torch.randn(2, 3, 64, 64)
    settings = {"profile": False, "time_limit_s": 2}
    least = plan(copy.deepcopy(model), sample, "100%", **settings).sn_memory.plan.peak_bytes
    among_ranks()
    early = plan(copy.deepcopy(model), sample, "120%", **settings)
    tight = plan(copy.deepcopy(model), sample, least, **settings)
    assert tight.sn_memory.plan.peak_bytes <= least
    orders = [[op.kind for op in it.sn_memory.trace.graph.ops] for it in (early, tight)]
    assert orders[1][-1] != orders[0][-1]
    assert verify(tight, sample).equal


HOROVOD = """
import json, sys, torch
import horovod.torch as hvd
from sn_compress import FFTCompression
from small_models import mlp
from sn_memory.torch import plan
hvd.init()
torch.set_num_threads(1)
sample = torch.randn(64, 64, generator=torch.Generator().manual_seed(hvd.rank()))
found = []
for mode in ("plain", "together", "overlap"):
    torch.manual_seed(0)
    model = mlp(4, 64)
    sys.modules[plan.__module__].exchanges_gradients = lambda: mode == "overlap"
    if mode != "plain":
        model = plan(model, sample, "85%", profile=False, planner="sqrt_n")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), FFTCompression)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(sample).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found.append([losses, [it.double().sum().item() for it in model.parameters()]])
if hvd.rank() == 0:
    print(json.dumps(found))
"""


@pytest.mark.horovod
@pytest.mark.slow
def test_horovod_with_compressed_gradients(horovodrun, rank_script):
    """Planned, planned with overlap and plain: the same losses and weights to the bit."""
    folder = str(Path(__file__).parent)
    script = rank_script(f"import sys; sys.path.insert(0, {folder!r})\n{HOROVOD}")
    out = horovodrun(2, script).check().stdout
    (line,) = (line[line.index("[[[") :] for line in out.splitlines() if "[[[" in line)
    plain, together, overlap = json.loads(line)
    assert plain == together == overlap
    assert plain[0][-1] < plain[0][0]
