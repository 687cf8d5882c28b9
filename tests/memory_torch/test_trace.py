"""What a traced step says, and which models are refused."""

import pytest
import torch
from small_models import Everything, images, mlp, module_of
from steps import exact
from torch import nn

from sn_memory import plan_graph
from sn_memory.graph.liveness import peak
from sn_memory.torch import TraceError, plan, trace, verify


def kinds(graph, phase):
    return [op.kind for op in graph.ops if op.phase == phase]


def test_a_chain_is_what_runs():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = trace(model, torch.zeros(30, 4), profile=False).graph
    assert kinds(graph, "forward") == ["addmm", "relu", "addmm"]
    # Each linear layer: gradient of its input but for the first, of its weight, of its bias; that
    # of the last bias at the end, as it is made of what the caller holds anyway.
    assert kinds(graph, "backward") == [
        *("loss", "mm", "mm", "threshold_backward"),
        *("mm", "sum", "sum"),
    ]
    roles = {it.name: (it.role, it.bytes) for it in graph.storages}
    assert roles["0.weight"] == ("parameter", 4 * 8 * 4)
    assert roles["input 0"] == ("input", 30 * 4 * 4)
    assert sum(it.bytes for it in graph.storages if it.role == "gradient" and it.keep) == (
        4 * sum(it.numel() for it in model.parameters()) + 30 * 2 * 4
    )


def test_what_is_in_place_random_or_a_statistic():
    graph = trace(Everything(), images(), profile=False).graph
    ops = {op.kind: op for op in graph.ops}
    assert graph.ops[0].name == "conv1/convolution#0"
    assert ops["relu_"].writes
    assert not ops["relu_"].outputs
    assert ops["bernoulli_"].random
    assert ops["bernoulli_"].replayable
    assert not ops["native_batch_norm"].writes
    assert not [op for op in graph.ops if op.random and op.kind != "bernoulli_"]
    assert not {"view", "transpose", "t", "detach", "expand"} & {op.kind for op in graph.ops}
    # Gradients are added in place.
    assert {"add", "add_"} & {*kinds(graph, "backward")} == {"add_"}


def test_the_loss_stands_between_and_outputs_are_not_made_twice():
    graph = trace(mlp(2), torch.zeros(3, 32), profile=False).graph
    place = graph.op_index["loss"]
    loss = graph.ops[place]
    assert loss.fixed
    assert loss.effect
    assert {op.phase for op in graph.ops[:place]} == {"forward"}
    assert {op.phase for op in graph.ops[place:]} == {"backward"}
    (maker,) = (op for op in graph.ops if set(op.outputs) & set(loss.inputs))
    assert maker.once


ACTIVATIONS = "ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Sigmoid", "Tanh", "Hardtanh", "Softplus"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_pass_elementwise_functions_in_place(name):
    kind = getattr(nn, name)
    model = nn.Sequential(nn.Linear(32, 32), kind(), nn.Linear(32, 32), kind(), nn.Linear(32, 4))
    sample = torch.randn(16, 32)
    planned = plan(model, sample, "100%", profile=False)
    (*_, last) = (op for op in planned.sn_memory.trace.graph.ops if op.kind.endswith("_backward"))
    assert last.writes
    assert not last.outputs
    found = exact(planned, sample)
    assert found.predicted_peak_bytes <= found.unplanned_peak_bytes


def test_a_gradient_still_needed_is_not_written_over():
    """Products whose gradients read a gradient twice, and one that is also a result."""

    def forward(self, x):
        x = self.layer(x)
        y = x * x.sin()
        return (y * y.exp() / 3).sum() + y.sum()

    model, sample = module_of(forward, layer=nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    assert verify(plan(model, sample, "100%", profile=False), sample).equal


def test_the_meta_device_will_do():
    there = trace(Everything(), images(), profile=False).graph
    with torch.device("meta"):
        model = Everything()
    model.scale = torch.ones(8)  # no buffer, so a tensor of its own
    nowhere = trace(model, images().to("meta"), profile=False).graph
    assert [op.kind for op in nowhere.ops] == [op.kind for op in there.ops]
    assert peak(nowhere).bytes == peak(there).bytes


def test_times_are_measured_and_kept(tmp_path):
    model, sample = mlp(2), torch.zeros(3, 32)
    # Gradients of earlier steps are no reason not to.
    model(sample).sum().backward()
    graph = trace(model, sample).graph
    assert graph.seconds_sources == {"measured": len(graph.ops)}
    (file,) = (tmp_path / "sn_memory").iterdir()
    written = file.stat().st_mtime_ns
    assert [op.seconds for op in trace(model, sample).graph.ops] == [op.seconds for op in graph.ops]
    assert file.stat().st_mtime_ns == written


def test_a_graph_has_a_roofline_without_profile_and_can_be_written_and_planned(tmp_path):
    graph = trace(mlp(), torch.zeros(64, 32), profile=False).graph
    assert set(graph.seconds_sources) == {"roofline", "measured"}
    assert graph.seconds_sources["measured"] == 1  # the loss, which is outside
    # Two operations per multiply-add: 64 rows, 32 by 32.
    assert graph.ops[0].flops == 2 * 64 * 32 * 32
    text = graph.to_json(tmp_path / "graph.json")
    assert type(graph).from_json(text) == graph
    assert plan_graph(graph, "90%", planner="sqrt_n").peak_bytes <= 0.9 * peak(graph).bytes


def looks(model, h, x):
    return h * 2 if h.sum() > 0 else h


def counts(model, h, x):
    model.count += 1
    return h


def checkpoints(model, h, x):
    return torch.utils.checkpoint.checkpoint(
        lambda it: nn.functional.dropout(it).exp(), h, use_reentrant=False
    )


def calls_backward(model, h, x):
    h.sum().backward(retain_graph=True)
    return h


# More of it, and that a refused model is as it was: test_model_unchanged.py.
@pytest.mark.parametrize(("odd", "says"), [
    (looks, r"(?s)depend on values.*test_trace\.py:\d+|test_trace\.py:\d+.*depend on values"),
    (lambda model, h, x: h[h > 0], "depend on values"), (counts, "sets count"),
    (lambda model, h, x: h + x.add_(1), "changes an input"), (checkpoints, "in the backward pass"),
    (lambda model, h, x: h.detach(), "no backward pass"),
    (lambda model, h, x: h + torch.rand(4, generator=torch.Generator()), "generator"),
    (calls_backward, r"calls backward, which adds to layer\.weight\.grad"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_refused(odd, says):
    model = module_of(
        lambda self, x: odd(self, self.layer(x.clone()), x), layer=nn.Linear(4, 4), count=0
    )
    with pytest.raises(TraceError, match=says):
        trace(model, torch.zeros(2, 4), profile=False)
