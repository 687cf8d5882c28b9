"""Planned models under FSDP2: sharded as a whole, module by module, and what is said if neither."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.fsdp")

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import json, sys, time, warnings, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from small_models import mlp
from sn_memory.torch import TraceError, plan
torch.set_num_threads(1)
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
sample = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))

def trained(inner, budget=None, backend=None):
    torch.manual_seed(0)
    model, ran, said = mlp(6), [], []
    if backend:
        model = plan(model, sample, budget, backend=backend, profile=False)
        again = bool(model.sn_memory.plan.decided("recompute"))
        step = model.sn_memory.latest
        own = step.run
        step.run = lambda *given: ran.append(1) or own(*given)
    if inner:
        for block in model:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(sample).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    said = [str(it.message) for it in caught if "plan" in str(it.message)]
    weights = [it.full_tensor().double().sum().item() for it in model.parameters()]
    result = {"losses": losses, "weights": weights}
    if backend:
        result |= {"ran": len(ran), "said": said, "again": again}
    return result, model

found = {}
for name, given in {
    "plain": (False,),
    "plain, inner": (True,),
    "graph": (False, "80%", "graph"),
    "modules, inner": (True, "90%", "modules"),
    "graph, inner": (True, "80%", "graph"),
}.items():
    found[name], model = trained(*given)
try:
    plan(model, sample, "80%", backend="graph", profile=False)
except TraceError as error:
    found["planned after"] = str(error)
print(json.dumps(found))
time.sleep(0.2)  # docs/ddp.md says why
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_of_fsdp(tmp_path):
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    for out, _ in ended:
        found = json.loads(out.splitlines()[-1])
        plain, inner = found["plain"], found["plain, inner"]
        whole = found["graph"]
        assert (whole["ran"], whole["said"], whole["again"]) == (2, [], True)
        assert whole["losses"] == plain["losses"]
        assert whole["weights"] == plain["weights"]
        modules = found["modules, inner"]
        assert (modules["ran"], modules["said"], modules["again"]) == (2, [], True)
        assert modules["losses"] == inner["losses"]
        assert modules["weights"] == inner["weights"]
        # Ops are planned on whole parameters: it trains right, plainly, and says why, once.
        refused = found["graph, inner"]
        assert refused["ran"] == 0
        assert refused["losses"] == inner["losses"]
        (said,) = refused["said"]
        assert "sharded after planning" in said
        assert "backend='modules'" in said
        assert "shape" not in said
        assert "before it is sharded" in found["planned after"]
