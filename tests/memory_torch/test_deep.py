"""Deep nets have tens of thousands of calls: what is kept of each is to be little."""

import gc
import tracemalloc

import torch
from torch import nn

from sn_memory.torch import plan, trace
from sn_memory.torch.eager import written

WIDTH = 32


def deep(blocks):
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(blocks)
        )
    )


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
    gc.collect()
    tracemalloc.start()
    traced = trace(model, sample, profile=False)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 2,500 bytes; 4,360 when sizes, strides and structures of arguments were made for each call.
    assert kept / len(traced.graph.ops) < 3400


def test_a_row_compiled_in_parts_does_the_same(monkeypatch):
    sample = torch.randn(64, WIDTH)
    model = deep(8)
    settings = {"profile": False, "planner": "greedy", "trial": False}
    whole = plan(model, sample, "70%", **settings)
    in_parts = plan(model, sample, "70%", **settings)
    results = []
    for planned, part in ((whole, 1000), (in_parts, 3)):
        monkeypatch.setattr(written, "PART", part)
        for _ in range(3):  # the third runs what was compiled
            model.zero_grad()
            out = planned(sample)
            out.sum().backward()
        results.append([out, *(it.grad.clone() for it in model.parameters())])
    assert all(map(torch.equal, *results))
    step = in_parts.sn_memory.latest
    assert step.program.forward.function.__name__ == "run_parts"
    assert whole.sn_memory.latest.program.forward.function.__name__ == "run"
