"""Where the extension was not built: one error that says how to get it, whoever asks for a plan."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import contextlib, io, json, sys
sys.modules["sn_memory._core"] = None  # as if there were no such module
import torch, sn_memory.torch
from sn_cli.main import main
from sn_memory import Graph, Op, Storage, pack, plan_graph
from sn_memory.check import check_packing
from sn_memory.graph.liveness import peak

storages = [Storage("x", 8, "input"), Storage("h", 8), Storage("y", 8, keep=True)]
ops = [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)]
graph = Graph(storages, ops)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.zeros(2, 4), "100%"
calls = {
    "plan_graph": lambda: plan_graph(graph, "90%"),
    "pack": lambda: pack([(0, 2, 4), (1, 3, 4)]),
    "torch": lambda: sn_memory.torch.plan(*model, profile=False),
    "torch by modules": lambda: sn_memory.torch.plan(*model, backend="modules"),
}
found = {}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
with contextlib.redirect_stderr(io.StringIO()) as shown:
    code = main(["memory", "plan", "alexnet", "--budget", "90%", "--quiet"])
found["the command line"] = f"{code} {shown.getvalue()}"
assert Graph.from_json(graph.to_json()) == graph
found["what plans nothing"] = [peak(graph).bytes, check_packing([(0, 2, 4), (1, 3, 4)], [0, 4])]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("who", "begins"), [
    *((it, "MissingExtra: ") for it in ("plan_graph", "pack", "torch", "torch by modules")),
    ("the command line", "2 sn: "),
])  # fmt: skip
def test_the_error_says_how_to_build_it(found, who, begins):
    (error,) = found[who].splitlines()  # no traceback
    assert error.startswith(begins)
    assert "sn_memory._core, which cannot be loaded" in error
    assert "apt-get install g++ python3-dev" in error
    assert "install superneurons again" in error


def test_what_plans_nothing_works(found):
    assert found["what plans nothing"] == [24, 8]
