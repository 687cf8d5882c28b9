"""Where the extension was not built: one error that says how to get it, whoever asks for a plan."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# As if there were no such module.
ABSENT = "import sys\nsys.modules['sn_memory._core'] = None\n"
GRAPH = (
    "from sn_memory import Graph, Op, Storage\n"
    "storages = [Storage('x', 8, 'input'), Storage('h', 8), Storage('y', 8, keep=True)]\n"
    "ops = [Op('f', ('x',), ('h',), seconds=1.0), Op('g', ('h',), ('y',), seconds=1.0)]\n"
    "graph = Graph(storages, ops)\n"
)
TORCH = (
    "import torch, sn_memory.torch\n"
    "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
    "sn_memory.torch.plan(model, torch.zeros(2, 4), '100%', {})\n"
)
CALLS = {
    "plan_graph": GRAPH + "from sn_memory import plan_graph\nplan_graph(graph, '90%')\n",
    "pack": "from sn_memory import pack\npack([(0, 2, 4), (1, 3, 4)])\n",
    "torch": TORCH.format("profile=False"),
    "torch by modules": TORCH.format("backend='modules'"),
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ABSENT + code], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS)
def test_the_error_says_how_to_build_it(code):
    done = run(code)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("sn_memory.base.errors.MissingExtra: "), done.stderr
    assert "sn_memory._core, which cannot be loaded" in error
    assert "apt-get install g++ python3-dev" in error
    assert "install superneurons again" in error


def test_the_command_line_says_it_without_a_traceback():
    done = run(
        "from sn_cli.main import main\n"
        "sys.exit(main(['memory', 'plan', 'alexnet', '--budget', '90%', '--quiet']))\n"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("sn: ")
    assert "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_plans_nothing_works():
    done = run(
        f"{GRAPH}"
        "from sn_memory.graph.liveness import peak\n"
        "from sn_memory.check import check_packing\n"
        "assert Graph.from_json(graph.to_json()) == graph\n"
        "print(peak(graph).bytes, check_packing([(0, 2, 4), (1, 3, 4)], [0, 4]))\n"
    )
    assert done.stdout.split() == ["24", "8"], done.stderr
