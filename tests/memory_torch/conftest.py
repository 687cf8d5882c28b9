"""What these tests share: one thread, a cache of times of their own, the benchmarks' networks."""

import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

import sn_memory.torch
from sn_memory.torch.compile import partitioner
from sn_memory.torch.trace import op_seconds, trace
from sn_memory.torch.trace.op_seconds import timeable

for folder in (Path(__file__).resolve().parent, Path(__file__).resolve().parents[2] / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import eager_kernels  # noqa: E402 - it is in one of these folders

# Of signatures: what tests measured.
_SCRATCH = {}


@pytest.fixture(autouse=True)
def _scratch_is_measured(request, monkeypatch):
    """Where ops are not timed their scratch is measured all the same: peaks are then told exactly.

    Tests marked `rule_of_scratch` have the upper rule that stands in for it.
    """
    if request.node.get_closest_marker("rule_of_scratch"):
        return
    by_rule = op_seconds.scratch_of

    def scratch_of(call, recording, device, cost):
        if cost is not None or device.type != "cpu" or not timeable(call):
            return by_rule(call, recording, device, cost)
        key = op_seconds.signature(call), op_seconds.circumstances()
        if key not in _SCRATCH:
            with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
                cost = op_seconds._cost(call, recording, device)
            _SCRATCH[key] = by_rule(call, recording, device, cost)
        return _SCRATCH[key]

    _set_scratch(monkeypatch, scratch_of)


@pytest.fixture
def _no_scratch(_scratch_is_measured, monkeypatch):
    """For tests of what is chosen: kernels of small convolutions take more than their tensors."""
    _set_scratch(monkeypatch, lambda *_: 0)


def _set_scratch(monkeypatch, scratch_of):
    for module in op_seconds, trace:
        monkeypatch.setattr(module, "scratch_of", scratch_of)


@pytest.fixture(autouse=True)
def _kernels_are_not_compiled(request, monkeypatch, tmp_path):
    """By backend='compile' graphs run call by call, but in tests marked `inductor`."""
    if not request.node.get_closest_marker("inductor"):
        monkeypatch.setattr(partitioner, "compile_fx", eager_kernels.compile_fx)
        # Where plans are kept as well.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """One thread, so that sums are taken in one order; no file of ours in the user's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def modules_take_no_time(monkeypatch):
    """What runs again among compressed activations is chosen by bytes alone, not by a clock."""
    monkeypatch.setattr("sn_memory.torch.activations.compress.now", lambda device: 0.0)


@pytest.fixture
def modules_take_long(modules_take_no_time, monkeypatch):
    """No module runs again."""
    clock = count()
    monkeypatch.setattr(
        "sn_memory.torch.activations.compress.now", lambda device: float(next(clock))
    )


@pytest.fixture
def among_ranks(monkeypatch):
    """Return a function that lets plans be those of one of so many ranks that train together."""
    module = sys.modules[sn_memory.torch.plan.__module__]
    return lambda ranks=2: monkeypatch.setattr(module, "exchanges_gradients", lambda: ranks > 1)
