"""Deep nets have tens of thousands of calls: what is kept of each is to be little."""

import gc
import sys
import time
import tracemalloc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sn_memory.torch import plan, trace
from sn_memory.torch.eager import instructions
from sn_memory.torch.model.guards import every_read, signature_of

WIDTH = 32


def deep(blocks):
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(blocks)
        )
    )


class Solver(nn.Module):
    """One small block, called in a loop of Python, as solvers of ODEs do."""

    def __init__(self, calls):
        super().__init__()
        self.block, self.calls = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), calls

    def forward(self, x):
        for _ in range(self.calls):
            x = x + 0.01 * self.block(x)
        return x


def test_questions_for_a_device_do_not_pass_all_modes(monkeypatch):
    """Autograd asks six times an op; they were most of what modes saw."""
    asked = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def counted(self, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    graph = trace(Solver(20), torch.randn(32, 16), profile=False).graph
    # Recorded, and run once more for the peak without a plan; views are no ops of the graph.
    assert len(asked) < 4 * len(graph.ops)
    assert asked.count("prim.device.default") < len(graph.ops) / 10


@pytest.mark.slow
def test_a_loop_of_two_thousand_calls_is_planned_in_half_a_minute():
    """It took 112 s: the limit of the search, and the trace. A slow machine is given more.

    Seconds of the processor: 27 on one machine, 95 to 122 on another, where it would have taken
    some 400.
    """
    sample = torch.randn(32, 16)
    began = time.process_time()
    planned = plan(Solver(2000), sample, "60%", profile=False)
    assert time.process_time() - began < 200
    assert planned.sn_memory.plan.peak_bytes <= planned.sn_memory.budget_bytes


class Counted:
    """Python's bytes that are made inside: those that are kept, and the most there were."""

    def __enter__(self):
        gc.collect()
        tracemalloc.start()
        return self

    def __exit__(self, *_):
        gc.collect()
        self.kept, self.most = tracemalloc.get_traced_memory()
        tracemalloc.stop()


def test_equal_forms_are_one_object():
    calls = trace(deep(30), torch.randn(64, WIDTH), profile=False).captured.recording.calls
    views = [it for call in calls for it in call.flat if hasattr(it, "stride")]
    for name in ("size", "stride"):
        values = [getattr(it, name) for it in views]
        # Tuples of an in-place sum or of a call taken apart are made anew, for a few calls.
        assert len({id(it) for it in values}) < len(values) / 10
    assert len({id(call.spec) for call in calls}) <= len({call.target for call in calls}) + 3


def test_what_a_trace_keeps_of_a_call():
    sample = torch.randn(64, WIDTH)
    trace(deep(2), sample, profile=False)  # what is made once
    model = deep(120)
    with Counted() as counted:
        traced = trace(model, sample, profile=False)
    kept = counted.kept
    # 2,500 bytes; 4,360 when sizes, strides and structures of arguments were made for each call.
    assert kept / len(traced.graph.ops) < 3400


def test_a_row_compiled_in_parts_does_the_same(monkeypatch):
    sample = torch.randn(64, WIDTH)
    model = deep(8)
    settings = {"profile": False, "planner": "sqrt_n"}
    whole = plan(model, sample, "70%", **settings)
    in_parts = plan(model, sample, "70%", **settings)
    results = []
    for planned, part in ((whole, 1000), (in_parts, 3)):
        monkeypatch.setattr(instructions, "PART", part)
        for _ in range(3):  # the third runs what was compiled
            model.zero_grad()
            out = planned(sample)
            out.sum().backward()
        results.append([out, *(it.grad.clone() for it in model.parameters())])
    assert all(map(torch.equal, *results))
    rows = [it.sn_memory.latest.program.forward for it in (whole, in_parts)]
    assert not any(it.instructions for it in rows)


def kept_bytes(make):
    """Bytes that are kept when what is made for the first time was there before."""
    made = [make()]
    with Counted() as counted:
        made.append(make())
    return counted.kept


def test_modules_that_are_alike_are_noted_once():
    sample = torch.randn(64, WIDTH)
    few, many = deep(2), deep(120)
    given = (sample,), {}
    for note in (every_read, lambda model: signature_of(model, given, every_read(model))):
        more = kept_bytes(lambda note=note: note(many)) - kept_bytes(lambda note=note: note(few))
        # A reference, and of lists what they hold ahead; a set for each was 2,300 bytes.
        assert more < 472 * 40


def test_tracing_leaves_the_attributes_of_modules_as_compact_as_they_were():
    """Emptied and filled anew, a dict no longer shares its names with those of its kind."""
    model, sample = deep(20), torch.randn(64, WIDTH)
    trace(deep(2), sample, profile=False)
    before = [sys.getsizeof(module.__dict__) for module in model.modules()]
    trace(model, sample, profile=False)
    assert [sys.getsizeof(module.__dict__) for module in model.modules()] == before


def test_what_a_written_step_keeps_and_takes_to_write():
    """A thousand lines compiled at once took 8 MB, at the peak of the step."""
    sample = torch.randn(64, WIDTH)
    settings = {"profile": False, "planner": "sqrt_n"}

    def step(planned):
        planned.zero_grad()
        planned(sample).sum().backward()

    small, planned = (plan(deep(it), sample, "100%", **settings) for it in (2, 240))
    for _ in range(3):
        step(small)
    step(planned)
    calls = len(planned.sn_memory.trace.graph.ops)
    with Counted() as counted:
        step(planned)
    # 470 and 1.95 million bytes. The instructions go meanwhile, and were there before.
    assert counted.kept / calls < 600
    assert counted.most < 4e6
    program = planned.sn_memory.latest.program
    assert not any(
        it.instructions for it in (program.forward, *(it.row for it in program.backward))
    )
