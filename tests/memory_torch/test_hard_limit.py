"""Training under a hard limit of the process, where the plain model is refused memory.

The limit is RLIMIT_DATA: the system refuses anonymous private memory beyond it. It is set when all
has been imported, so that it is one of planning and training.
"""

import json
import os
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
from sn_memory.run.reserved import process_bytes

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LIMITED = """
import json, re, resource, sys
from pathlib import Path
import torch
from torch import nn
import sn_memory.torch

torch.set_num_threads(1)
sn_memory.settings.deterministic = True
way, more = sys.argv[1], int(sys.argv[2])
settings = {"profile": False, "time_limit_s": 0.5}

def limit():
    text = Path("/proc/self/status").read_text()
    most = int(re.search(r"VmData:\\s+(\\d+)", text)[1]) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
"""
# Without a budget: the limit is it.
ACTIVATIONS = """
def net(width, depth):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

import scipy.optimize, torch._dynamo  # what planning imports late is there before the limit
model, sample = net(64, 48), torch.ones(32768, 64)
limit()
if way == "planned":
    settings["time_limit_s"] = 2.0
    model = sn_memory.torch.plan(model, sample, **settings)
for _ in range(3):
    model(sample).mean().backward()
    model.zero_grad()
print(json.dumps(model.sn_memory.plan.decisions != ()))
"""
STATE = """
def train(width, layers, budget, steps):
    sample = torch.ones(16, width)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if way != "plain":
        held = sn_memory.torch.HostState(sys.argv[3], update=way)
        held.hold(model)
    else:
        model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters())
    if way != "plain":
        kept = {"optimizer": optimizer, "state": held}
        model = sn_memory.torch.plan(model, sample, budget, **kept, **settings)
    losses = []
    for _ in range(steps):
        loss = model(sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses

train(8, 4, "95%", 1)  # all is imported
if more:
    limit()
print(json.dumps(train(1024, 10, "56MiB", 3)))
"""
ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="RLIMIT_DATA counts such memory on Linux"
)


def child(code, way, more, *arguments, **environment):
    """Run code within so many bytes more than it takes by then; what it printed, or its errors."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    environment.pop("SN_MEMORY_MALLOC", None)
    command = [sys.executable, "-c", LIMITED + code, way, str(more), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    return ran.stderr if ran.returncode else json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@ON_LINUX
def test_a_plan_without_a_budget_trains_under_a_limit_that_refuses_plain():
    """48 activations of 8 MiB in 160 MiB beside what a process takes."""
    more = process_bytes(None) + 160 * MIB
    assert "allocate memory" in child(ACTIVATIONS, "plain", more)
    assert child(ACTIVATIONS, "planned", more) is True


@pytest.mark.slow
@ON_LINUX
def test_state_trains_where_plain_torch_is_refused_memory(tmp_path):
    """10 million parameters: 160 MiB of AdamW training, within 110 MiB."""
    # What is released goes to the system at once.
    at_once = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    plain = child(STATE, "plain", 0, **at_once)
    assert isinstance(plain, list), plain
    assert "allocate memory" in child(STATE, "plain", 110 * MIB, **at_once)
    for way in ("backward", "step"):
        assert child(STATE, way, 110 * MIB, tmp_path, **at_once) == plain


SETTINGS = {"profile": False}


def small():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 32)


def test_the_budget_counts_what_of_the_step_is_there(monkeypatch):
    free = process_bytes(None) + 320 * MIB
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("memory.max", free))
    model, sample = small()
    room = free - process_bytes(None) - int(reserved.SHARE * free)
    held = sum(it.nbytes for it in model.parameters())
    for samples in (sample, [sample[:4].clone(), sample]):
        planned = sn_memory.torch.plan(model, samples, **SETTINGS)
        assert planned.sn_memory.budget_bytes == room + held + sample.nbytes
        assert not planned.sn_memory.plan.overhead
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(sample).sum().backward()
    optimizer.step()
    planned = sn_memory.torch.plan(model, sample, "limit", optimizer=optimizer, **SETTINGS)
    # Gradients, and the momentum.
    assert planned.sn_memory.budget_bytes == room + 3 * held + sample.nbytes
    # Of a device that is not here the budget is its room.
    planned = sn_memory.torch.plan(*small(), device="h100", **SETTINGS)
    assert planned.sn_memory.budget_bytes == named("h100").usable_bytes


def test_without_a_known_limit_or_room_the_error_asks_for_a_budget(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: None)
    with pytest.raises(sn_memory.PlanError, match=r"RLIMIT_DATA.*Pass budget="):
        sn_memory.torch.plan(*small(), **SETTINGS)
    model, sample = small()
    with pytest.raises(sn_memory.PlanError, match=r"free on meta.*Pass budget="):
        sn_memory.torch.plan(model.to("meta"), sample.to("meta"), **SETTINGS)
