"""Gradients that are handed over as they become ready: same bits, hooks once, ranks end equal."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from small_models import Everything, images, mlp
from steps import grads, same

from sn_memory.torch import plan, verify

SETTINGS = {"profile": False, "planner": "sqrt_n"}


@pytest.fixture
def among_ranks(monkeypatch):
    """Plan as one of several ranks."""
    monkeypatch.setattr(sys.modules[plan.__module__], "exchanges_gradients", lambda: True)


def trained(model, steps=2):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()
    return list(model.state_dict().values())


def test_bits_are_the_same(among_ranks):
    model = Everything()
    planned = plan(copy.deepcopy(model), images(), "75%", **SETTINGS)
    assert all(map(torch.equal, trained(planned), trained(model)))


def test_gradients_become_ready_while_the_backward_pass_runs(among_ranks):
    """Those of the last layer first, and long before the first layer's are computed."""
    model, sample = mlp(6), torch.randn(64, 32)
    order = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda it, name=name: order.append(
                (name, sum(p.grad is not None for p in model.parameters()))
            )
        )
    planned = plan(model, sample, "80%", **SETTINGS)
    planned(sample).sum().backward()
    layers = [int(name.partition(".")[0]) for name, _ in order]
    assert layers == sorted(layers, reverse=True)
    assert sorted(name for name, _ in order) == sorted(name for name, _ in model.named_parameters())
    assert [ready for _, ready in order][:2] == [1, 2]


def test_an_order_that_holds_less_where_the_budget_asks_for_it(monkeypatch):
    """On ranks gradients are made early if a plan of that keeps the budget, and late if none."""
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(8)),
        *(torch.nn.Flatten(), torch.nn.Linear(512, 1024), torch.nn.ReLU()),
        torch.nn.Linear(1024, 10),
    )
    sample, settings = torch.randn(2, 3, 64, 64), {"profile": False, "time_limit_s": 2}
    least = plan(copy.deepcopy(model), sample, "100%", **settings).sn_memory.plan.peak_bytes
    monkeypatch.setattr(sys.modules[plan.__module__], "exchanges_gradients", lambda: True)
    early = plan(copy.deepcopy(model), sample, "120%", **settings)
    tight = plan(copy.deepcopy(model), sample, least, **settings)
    assert tight.sn_memory.plan.peak_bytes <= least
    orders = [[op.kind for op in it.sn_memory.trace.graph.ops] for it in (early, tight)]
    assert orders[0] != orders[1]
    assert orders[1][-1] != orders[0][-1]
    assert verify(tight, sample).equal


@pytest.mark.filterwarnings("ignore:.* finds gradients")  # The budget is one step's.
def test_peak_and_accumulation(among_ranks):
    model, sample = mlp(6), torch.randn(64, 32)
    planned = plan(copy.deepcopy(model), sample, "80%", **SETTINGS)
    found = verify(planned, sample)
    assert found.equal, found.different
    # Eight bytes more at the loss: the number by which autograd finds the step, and its gradient.
    assert found.measured_peak_bytes - found.predicted_peak_bytes in (0, 8)
    for it in (model, planned):
        for _ in range(2):
            it(sample).sum().backward()
    assert same(grads(planned), grads(model))


def test_gradients_of_inputs_come_as_ever(among_ranks):
    model, sample = mlp(3), torch.randn(8, 32, requires_grad=True)
    planned = plan(copy.deepcopy(model), sample, "100%", **SETTINGS)
    gradients = []
    for it in (model, planned):
        sample.grad = None
        it(sample).sum().backward()
        gradients.append(sample.grad)
    assert torch.equal(*gradients)


HOROVOD = """
import json, sys, torch
import horovod.torch as hvd
from sn_compress import FFTCompression
from small_models import mlp
from sn_memory.torch import plan
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = mlp(4, 64)
sample = torch.randn(64, 64, generator=torch.Generator().manual_seed(hvd.rank()))
if sys.argv[1] != "plain":
    if sys.argv[1] != "overlap":
        sys.modules[plan.__module__].exchanges_gradients = lambda: False
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
if hvd.rank() == 0:
    print(json.dumps([losses, [it.double().sum().item() for it in model.parameters()]]))
"""


@pytest.mark.horovod
@pytest.mark.slow
def test_horovod_with_compressed_gradients(horovodrun, tmp_path):
    """Planned, planned with overlap and plain: the same losses and weights to the bit."""
    script = tmp_path / "rank.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{HOROVOD}")
    said = []
    for mode in ("plain", "together", "overlap"):
        out = horovodrun(2, script, mode).check().stdout
        said.append(next(line[line.index("[[") :] for line in out.splitlines() if "[[" in line))
    assert said[0] == said[1] == said[2]
    losses = json.loads(said[0])[0]
    assert losses[-1] < losses[0]
