"""Two ranks of torch.distributed on this machine, each a process that runs the same code."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What ranks begin and end with, and how they train: the largest peak is that of the last steps.
START = """
import json, sys, time, torch
from contextlib import nullcontext
from torch import nn
from small_models import WithLoss, mlp
from sn_memory.torch import StorageTracker, plan
from steps import rows
torch.set_num_threads(1)
rank, store, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def train(model, apart=rank, begin=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, peaks = [], []
    for at in range(steps):
        optimizer.zero_grad()
        begin()
        x = rows(512, 2 * at + apart)
        tracker = StorageTracker([*model.parameters(), x])
        with tracker if at >= steps - 3 else nullcontext():
            loss = model(x)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        peaks.append(tracker.peak_bytes)
    gathered = (it.full_tensor() if hasattr(it, "full_tensor") else it for it in model.parameters())
    weights = [it.double().sum().item() for it in gathered]
    return {"losses": losses, "peak": max(peaks), "weights": weights}
"""
END = """
time.sleep(0.2)  # docs/ddp.md says why
torch.distributed.destroy_process_group()
"""


def run_two_ranks(code, store, *arguments, timeout_s=200):
    """Run code with its rank, the path of a store and more arguments; what each prints last, JSON.

    Modules of these tests can be imported there.
    """
    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(store), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=timeout_s) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]
