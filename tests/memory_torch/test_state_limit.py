"""Training under a hard limit that parameters, gradients and state exceed: plain torch dies of it.

The limit is RLIMIT_DATA: the system refuses anonymous private memory beyond it. It is set when all
has been imported and a toy was planned, so that it is one of the training alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import json, re, resource, sys
from pathlib import Path
import torch
import sn_memory.torch

torch.set_num_threads(1)
sn_memory.settings.deterministic = True
way, limit = sys.argv[1], int(sys.argv[2])

def net(width, layers):
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))

def train(width, layers, budget, steps):
    model, sample = net(width, layers), torch.ones(16, width)
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
        model = sn_memory.torch.plan(
            model, sample, budget, optimizer=optimizer, state=held,
            profile=False, time_limit_s=0.5,
        )
    losses = []
    for _ in range(steps):
        loss = model(sample).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses

train(8, 4, "95%", 1)
if limit:
    text = Path("/proc/self/status").read_text()
    most = int(re.search(r"VmData:\\s+(\\d+)", text)[1]) * 1024 + (limit << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
print(json.dumps(train(1024, 10, "56MiB", 3)))
"""


def child(way, limit, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        # What is given back goes to the system at once.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
    }
    command = [sys.executable, "-c", CHILD, way, str(limit), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts such memory on Linux")
def test_it_trains_where_plain_torch_is_refused_memory(tmp_path):
    """10 million parameters: 160 MiB of AdamW training, within 110 MiB."""
    plain = child("plain", 0, tmp_path)
    assert plain.returncode == 0, plain.stderr
    died = child("plain", 110, tmp_path)
    assert died.returncode != 0
    assert "allocate memory" in died.stderr
    for way in ("backward", "step"):
        ours = child(way, 110, tmp_path)
        assert ours.returncode == 0, ours.stderr[-2000:]
        assert json.loads(ours.stdout.splitlines()[-1]) == json.loads(plain.stdout.splitlines()[-1])
