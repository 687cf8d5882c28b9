"""Ways to carry convolutions out: chosen by a table on the CPU, as by measurement on a GPU."""

import pytest
import torch
from torch import nn

from sn_memory.torch import plan, trace, verify
from sn_memory.torch.eager import instructions
from sn_memory.torch.trace.op_seconds import WAYS, carried_out

SAMPLE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
KIB = 1024
# Seconds and workspace of each way: the search is fastest and largest, the native way pointless.
TABLE = {
    "heuristic": (2.0, 4 * KIB),
    "search": (1.0, 64 * KIB),
    "deterministic": (3.0, 0),
    "native": (4.0, 8 * KIB),
}


def table(call, way):
    return TABLE[way]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten()
    )


def ways_taken(planned):
    made, graph = planned.sn_memory.plan, planned.sn_memory.trace.graph
    ops = {op.name: op for op in graph.ops}
    return [
        ops[it.target].workspaces[it.way].name
        for it in made.actions
        if it.kind == "run" and ops[it.target].workspaces
    ]


def test_what_no_plan_would_take_is_not_offered(network):
    graph = trace(network, SAMPLE, profile=False, workspaces=table).graph
    offered = {op.kind: [it.name for it in op.workspaces] for op in graph.ops if op.workspaces}
    expected = ["heuristic", "search", "deterministic"]
    assert offered == {"convolution": expected, "convolution_backward": expected}


@pytest.mark.parametrize(
    ("spare", "way"), [(0, "deterministic"), (4 * KIB, "heuristic"), (64 * KIB, "search")]
)
def test_what_is_left_free_decides(network, spare, way):
    """Where the live bytes are highest, the workspace is what the budget leaves beside them."""
    without = plan(network, SAMPLE, "100%", profile=False, workspaces=lambda *_: (1.0, 0))
    bare = without.sn_memory.plan.peak_bytes
    settings = {"profile": False, "workspaces": table, "techniques": ("keep",)}
    planned = plan(network, SAMPLE, bare + spare, **settings)
    made = planned.sn_memory.plan
    assert made.peak_bytes <= made.budget_bytes
    assert max(ways_taken(planned), key=lambda it: TABLE[it][0]) == way


def test_the_switches_are_set_while_a_convolution_runs(network, monkeypatch):
    planned = plan(network, SAMPLE, "1MiB", profile=False, workspaces=table)
    assert set(ways_taken(planned)) == {"search"}
    seen = []
    real = instructions.carried_out
    monkeypatch.setattr(instructions, "carried_out", lambda way: seen.append(way) or real(way))
    found = verify(planned, SAMPLE)
    assert found.equal
    # Two convolutions forward, and backward one call for the gradient of each weight and one for
    # that of the second one's input: in each of three planned steps.
    assert seen == 3 * ["search"] * 5


def test_switches_are_put_back():
    before = {name: getattr(torch.backends.cudnn, name) for name in WAYS["search"]}
    with carried_out("search"):
        assert torch.backends.cudnn.benchmark
    assert {name: getattr(torch.backends.cudnn, name) for name in WAYS["search"]} == before


def test_measuring_needs_a_gpu(network):
    with pytest.raises(ValueError, match="measures on a GPU"):
        plan(network, SAMPLE, "100%", profile=False, workspaces=True)


@pytest.mark.gpu
def test_measured_on_a_gpu(network):
    planned = plan(network.cuda(), SAMPLE.cuda(), "100%", workspaces=True)
    assert ways_taken(planned)
    assert verify(planned, SAMPLE.cuda()).measured_peak_bytes
