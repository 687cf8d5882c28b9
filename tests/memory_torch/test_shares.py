"""What percent of a budget are of: one peak, that of the model's own step, everywhere."""

from importlib import import_module

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from sn_memory import BudgetError, Graph, plan_graph
from sn_memory.torch import estimate, plan, trace, verify


class Holds(nn.Module):
    """Its forward has names for what it no longer needs, as Python code has."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        hidden = self.first(x)
        large = torch.cat([hidden.detach()] * 4, 1)
        scale = large.mean()
        for _ in range(8):
            hidden = torch.tanh(self.rest(hidden)) * scale
        return hidden.square().mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Holds()


X = torch.randn(256, 32)


def test_percent_are_of_what_estimate_and_verify_tell(model):
    planned = plan(model, X, "95%", profile=False)
    found = planned.sn_memory.plan
    traced = trace(model, X, profile=False, unplanned=False).graph
    assert found.baseline_peak_bytes > plan_graph(traced, "100%").peak_bytes
    assert planned.sn_memory.budget_bytes == int(0.95 * found.baseline_peak_bytes)
    whole = estimate(model, X).peak_bytes
    assert found.baseline_peak_bytes == whole == verify(planned, X).unplanned_peak_bytes


def test_an_optimizers_state_counts(model):
    optimizer = torch.optim.Adam(model.parameters())
    planned = plan(model, X, "95%", profile=False, optimizer=optimizer)
    found = estimate(model, X, optimizer=optimizer)
    assert planned.sn_memory.plan.baseline_peak_bytes == found.step_bytes


def test_percent_of_an_error_are_of_the_same(model):
    whole = estimate(model, X).peak_bytes
    with pytest.raises(BudgetError) as error:
        plan(model, X, "20%", profile=False)
    assert error.value.budget_bytes == int(0.2 * whole)
    assert error.value.percent == -(-100 * error.value.peak_bytes // whole)
    planned = plan(model, X, f"{error.value.percent}%", profile=False)
    assert planned.sn_memory.plan.peak_bytes >= error.value.peak_bytes


def test_a_graph_tells_it_in_its_file(model):
    graph = trace(model, X, profile=False).graph
    read = Graph.from_json(graph.to_json())
    assert read == graph
    assert read.unplanned_peak_bytes == estimate(model, X).peak_bytes
    assert plan_graph(read, "95%").budget_bytes == int(0.95 * read.unplanned_peak_bytes)


def test_a_fault_in_the_step_without_a_plan_is_not_hidden(monkeypatch):
    """Only what a step without values may be asked for leaves the peak of the traced one."""
    model, sample = Holds(), torch.randn(64, 32)
    traces = import_module("sn_memory.torch.trace.trace")

    def fails(error):
        def fake_step(*_, **__):
            raise error

        monkeypatch.setattr(traces, "fake_step", fake_step)

    fails(DataDependentOutputException(torch.ops.aten._local_scalar_dense.default))
    assert trace(model, sample, profile=False).graph.unplanned_peak_bytes is None
    fails(AttributeError("a fault"))
    with pytest.raises(AttributeError, match="a fault"):
        trace(model, sample, profile=False)
