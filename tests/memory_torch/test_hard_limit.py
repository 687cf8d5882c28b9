"""A plan without a budget keeps the limit of its process, where the plain model is refused."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sn_memory.torch
from sn_memory.base.host import Limit
from sn_memory.cost.devices import named
from sn_memory.run import reserved
from sn_memory.run.reserved import CALL_BYTES, CONVOLUTION_BYTES, FIXED_BYTES, process_bytes

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CHILD = """
import re, resource, sys
from pathlib import Path
import torch
from torch import nn
import sn_memory.torch

torch.set_num_threads(1)
sn_memory.settings.deterministic = True
settings = {"profile": False, "time_limit_s": 2.0}

def net(width, depth):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

import scipy.optimize, torch._dynamo  # what planning imports late is there before the limit
model, sample = net(64, 48), torch.ones(32768, 64)
held = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
most = held + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
if sys.argv[1] == "planned":
    model = sn_memory.torch.plan(model, sample, **settings)
for _ in range(3):
    model(sample).mean().backward()
    model.zero_grad()
print(model.sn_memory.plan.decisions != ())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts such memory on Linux")
def test_a_plan_without_a_budget_trains_under_a_limit_that_refuses_plain():
    """48 activations of 8 MiB in 160 MiB beside what a process takes."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("SN_MEMORY_MALLOC", None)

    def child(way):
        command = [sys.executable, "-c", CHILD, way, str(process_bytes(None) + 160 * MIB)]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    plain, planned = child("plain"), child("planned")
    assert plain.returncode
    assert "allocate memory" in plain.stderr
    assert planned.returncode == 0, planned.stderr[-2000:]
    assert planned.stdout.split() == ["True"]


SETTINGS = {"profile": False}


def small():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 32)


def test_the_budget_counts_what_of_the_step_is_there(monkeypatch):
    free = process_bytes(None) + 320 * MIB
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("memory.max", free))
    model, sample = small()
    room = free - process_bytes(None) - int(reserved.SHARE * free)
    held = sum(it.nbytes for it in model.parameters())
    for given in (sample, [sample[:4].clone(), sample]):
        planned = sn_memory.torch.plan(model, given, **SETTINGS)
        assert planned.sn_memory.budget_bytes == room + held + sample.nbytes
        assert not planned.sn_memory.plan.overhead
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(sample).sum().backward()
    optimizer.step()
    planned = sn_memory.torch.plan(model, sample, "limit", optimizer=optimizer, **SETTINGS)
    # Gradients, and the momentum.
    assert planned.sn_memory.budget_bytes == room + 3 * held + sample.nbytes


def test_for_a_device_that_is_not_here_the_budget_is_its_room():
    model, sample = small()
    planned = sn_memory.torch.plan(model, sample, device="h100", **SETTINGS)
    assert planned.sn_memory.budget_bytes == named("h100").usable_bytes


def test_where_nothing_is_known_the_error_asks_for_a_budget(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: None)
    with pytest.raises(sn_memory.PlanError, match=r"RLIMIT_DATA.*Pass budget="):
        sn_memory.torch.plan(*small(), **SETTINGS)
    model, sample = small()
    with pytest.raises(sn_memory.PlanError, match=r"free on meta.*Pass budget="):
        sn_memory.torch.plan(model.to("meta"), sample.to("meta"), **SETTINGS)


@pytest.mark.parametrize("convolutions", [0, 3])
def test_what_the_process_takes_is_stated(convolutions):
    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(convolutions)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 8))
    planned = sn_memory.torch.plan(model, torch.ones(2, 3, 4, 4), "100%", **SETTINGS)
    objects = len(planned.sn_memory.trace.graph.ops) * CALL_BYTES
    expected = FIXED_BYTES + convolutions * CONVOLUTION_BYTES + objects
    assert planned.sn_memory.process_bytes == expected


def test_a_limit_of_the_process_is_the_budget(monkeypatch):
    """Of all limits the smallest counts, ulimit -v as well."""
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    most = {resource.RLIMIT_AS: (1, 1)}
    monkeypatch.setattr(resource, "getrlimit", lambda it: most.get(it, infinite))
    with pytest.raises(sn_memory.PlanError, match=r"RLIMIT_AS, leaves 0 B"):
        sn_memory.torch.plan(*small(), **SETTINGS)
