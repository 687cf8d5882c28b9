"""How much of sn_compress a DDP step needs: modules, and calls from the hook to the arithmetic.

Both caps only fall: an import that is added has to be worth it, and so has a layer between. What is
counted, and how, is in benchmarks/evidence_ranks.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

# In sys.modules after three steps with low rank, of 122 once; two of them are ranks by nodes.
MOST_MODULES = 55
MOST_CALLS = 6  # generators included, of 17 once
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from evidence_ranks import closure, depth
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
print(json.dumps([*closure(), *depth()]))
dist.destroy_process_group()
"""


def test_a_step_needs_few_modules_and_few_calls(tmp_path):
    # One thread a rank, as torchrun sets it: a pool of threads is two calls more.
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(BENCHMARKS), str(tmp_path / "store")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    modules, *steps = json.loads(ran.stdout.splitlines()[-1])
    assert modules["count"] <= MOST_MODULES, modules["modules"]
    assert [row["key"] for row in steps] == ["low rank", "fft"]
    for row in steps:
        assert 3 < row["depth"] <= MOST_CALLS, row["stack"]
