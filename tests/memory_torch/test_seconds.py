"""Which calls are timed on made-up tensors, and what becomes of the times."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from small_models import Everything, images, mlp, module_of
from torch import nn

from sn_memory.cost.devices import NOMINAL
from sn_memory.cost.op_times import OpTimes
from sn_memory.torch import plan, trace
from sn_memory.torch.model.tracker import AllocationTracker
from sn_memory.torch.trace import op_seconds
from sn_memory.torch.trace.op_seconds import cached_costs, circumstances, rebuilt, timeable

CPU = torch.device("cpu")


def cached_seconds(measure):
    """Seconds of one op as `cached_costs` keeps them, of what takes no scratch."""

    def cost():
        seconds = measure()
        return None if seconds is None else (seconds, 0)

    (found,) = cached_costs([("op", cost)], CPU)
    return found and found[0]


@torch.library.custom_op("sn_memory_tests::only_mine", mutates_args=())
def only_mine(x: torch.Tensor) -> torch.Tensor:
    """An op that takes nothing but what its owner gives it."""
    assert x.shape == (0,), "this op was run on made-up values"
    return x.clone()


@only_mine.register_fake
def _(x):
    return torch.empty_like(x)


only_mine.register_autograd(lambda ctx, gradient: gradient)


class Embeds(nn.Module):
    """Indexes, gathers, selects by a mask, scatters, and a cross entropy."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)

    def forward(self, x):
        h = self.words(x)
        h = h + h[x % 2, 0] + torch.gather(h, 0, (x % 3)[..., None].expand_as(h))
        h = torch.where((x > 3)[..., None], h, h.sort(-1).values)
        h = torch.zeros(9, 5, 4).index_add(0, x[:, 0], h)
        h = nn.functional.max_pool1d(h, 2, stride=1)
        return nn.functional.cross_entropy(h.flatten(0, 1), torch.arange(45) % 3)


def calls_of(model, sample):
    return trace(model, sample, profile=False).captured.recording.calls


def sources(model, sample):
    return trace(model, sample, device=NOMINAL).graph.seconds_sources


def pools(x):
    return nn.functional.max_unpool1d(*nn.functional.max_pool1d(x, 2, return_indices=True), 2)


def solves(x):
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(x.detach() + torch.eye(6)), x)


def bags(x):
    offsets = torch.tensor([0, 2])
    return nn.functional.embedding_bag(torch.tensor([1, 2, 3]), x, offsets, mode="mean")


@pytest.mark.parametrize(("model", "sample"), [
    (mlp(2), torch.zeros(3, 32)), (Everything(), images()),
    (Embeds(), torch.arange(10).view(2, 5) % 7),
], ids=["linear", "convolutions", "indices"])  # fmt: skip
def test_what_is_common_is_timed(model, sample):
    assert all(map(timeable, calls_of(model, sample)))
    assert set(sources(model, sample)) == {"measured"}


@pytest.mark.parametrize(("op", "name"), [
    (only_mine, "only_mine"), (pools, "max_unpool2d"), (solves, "linalg_lu_solve"),
    (bags, "_embedding_bag"),
])  # fmt: skip
def test_what_reads_where_integers_say_is_not(op, name):
    """Of these some end the process on values of nobody's; none may be run to see which."""
    model = module_of(lambda self, x: op(self.linear(x)), linear=nn.Linear(6, 6))
    sample = torch.randn(6, 6)
    assert name in {call.name for call in calls_of(model, sample) if not timeable(call)}
    assert sources(model, sample)["roofline"] >= 1


def test_where_floats_share_a_storage_with_indices_the_indices_are_in_range():
    """A pool's backward asks its input for the shape only, and may be given its indices."""
    model = nn.Sequential(nn.Linear(6, 6), nn.MaxPool1d(2))
    recording = trace(model, torch.randn(6, 6), profile=False).captured.recording
    (call,) = (it for it in recording.calls if it.name == "max_pool2d_with_indices_backward")
    views = [it for it in call.flat if hasattr(it, "storage")]
    assert len({it.storage for it in views}) < len(views)
    made = rebuilt(replace(call, target=lambda *args: args), recording)()
    assert not made[-1].any()
    assert made[-1].dtype == torch.int64


def test_collectives_are_not_timed():
    """They would wait for ranks that do not come."""
    first, *_ = calls_of(mlp(1), torch.zeros(3, 32))
    assert timeable(first)
    collective = SimpleNamespace(namespace="_c10d_functional", tags=())
    assert not timeable(replace(first, target=collective))


def test_an_op_that_raises_anything_is_left_to_the_roofline(monkeypatch):
    error = AssertionError("made-up values")
    monkeypatch.setattr(op_seconds, "best_seconds", Mock(side_effect=error))
    graph = trace(mlp(1), torch.zeros(3, 32), device=NOMINAL).graph
    assert graph.seconds_sources["roofline"] == len(graph.ops) - 1


def test_what_could_not_be_timed_is_tried_again():
    answers = iter([None, 2.0])
    assert [cached_seconds(lambda: next(answers)) for _ in range(3)] == [None, 2.0, 2.0]


@pytest.mark.rule_of_scratch
def test_a_plan_writes_the_times_once(monkeypatch):
    """Also those of ops that only the plain step has: a convolution's backward in one call."""
    add = Mock(side_effect=OpTimes.add)
    monkeypatch.setattr(OpTimes, "add", lambda *given: add(*given))
    model = nn.Sequential(*(nn.Conv2d(3, 3, size, padding="same") for size in (1, 3, 5)))
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    plan(model, x, budget="100%", backend="graph")
    assert add.call_count == 1


def attribute(place, name):
    return lambda: getattr(place, name), lambda value: setattr(place, name, value)


CUDA, CUDNN, MKLDNN = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
SETTINGS = {
    "matmul": (*attribute(CUDA, "fp32_precision"), "tf32"),
    "convolutions": (*attribute(CUDNN.conv, "fp32_precision"), "ieee"),
    "onednn": (*attribute(MKLDNN.matmul, "fp32_precision"), "bf16"),
    "reduced": (*attribute(CUDA, "allow_bf16_reduced_precision_reduction"), False),
    "cudnn": (*attribute(CUDNN, "enabled"), False),
    "benchmark": (*attribute(CUDNN, "benchmark"), True),
    "cudnn deterministic": (*attribute(CUDNN, "deterministic"), True),
    "legacy": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_another_time(name):
    get, put, value = SETTINGS[name]
    before, plain = get(), circumstances()
    assert before != value
    times = iter([1.0, 2.0])
    assert cached_seconds(lambda: next(times)) == 1.0
    put(value)
    try:
        assert circumstances() != plain
        assert cached_seconds(lambda: next(times)) == 2.0
    finally:
        put(before)
    if name != "legacy":  # It sets more than is set back.
        assert cached_seconds(None) == 1.0


def test_a_device_is_measured_once_and_with_no_more_than_an_op_takes(monkeypatch):
    monkeypatch.setattr(op_seconds, "_MEASURED", {})
    with AllocationTracker() as tracker:
        speeds = op_seconds.measured_device(CPU, 600_000)
    assert 0 < tracker.peak_bytes <= 600_000
    monkeypatch.setattr(op_seconds, "best_seconds", None)
    assert op_seconds.measured_device(CPU, 500_000) is speeds
    with op_seconds.while_training():
        assert op_seconds.measured_device(CPU, 1 << 30) is speeds


@pytest.mark.rule_of_scratch
@pytest.mark.filterwarnings("ignore::sn_memory.base.errors.PlanWarning")
@pytest.mark.parametrize("backend", ["graph", "compile"])
def test_planning_while_training_measures_nothing(monkeypatch, backend):
    """A second micro-batch, and a new size of batch, are planned with what is known."""
    torch._dynamo.reset()
    monkeypatch.setattr(op_seconds, "_MEASURED", {})
    model = mlp(6)
    budget = "80%" if backend == "graph" else "100%"
    planned = plan(model, torch.randn(256, 32), budget, backend=backend)
    before = dict(op_seconds._MEASURED)
    for name in ("best_seconds", "transfer_speeds", "_cost"):
        refused = Mock(side_effect=AssertionError("measured while training"))
        monkeypatch.setattr(op_seconds, name, refused)
    for rows in (256, 256, 200):
        planned(torch.randn(rows, 32)).sum().backward()
    assert planned.sn_memory.inputs.later
    assert before == op_seconds._MEASURED
    assert planned.sn_memory.kinds[-1].how != "modules run again"
