"""The scripts of fuzz/ for graphs, plans, command lines and packing problems, in short."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("check: 0", "check: 2", "plan: 0", "plan: 1", "plan: 2", "pack: 2")


@pytest.mark.parametrize(("script", "target", "cases", "seen"), [
    ("planner", "graphs", 300, ("read", "GraphError")),
    ("planner", "plans", 200, ("accepted", "PlanError, checking", "PlanError, reading")),
    ("planner", "planned", 60, ("planned", "BudgetError", "GraphError")),
    ("planner", "commands", 80, COMMANDS),
    ("packer", "problems", 60, ("packed, proved", "CapacityError, proved", "PackError")),
    ("packer", "tables", 120, ("read, packed, proved", "PackError")),
    pytest.param("placing", "traces", 3, ("a thousand traces",), marks=pytest.mark.slow),
])  # fmt: skip
def test_damage_leads_to_documented_errors_or_to_what_is_true(script, target, cases, seen):
    if script == "placing" and not shutil.which("g++"):
        pytest.skip("g++, which compiles the traces, is not installed")
    path = ROOT / "fuzz" / f"{script}.py"
    done = subprocess.run(
        [sys.executable, str(path), "--only", target, "--cases", str(cases), "--seed", "7"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # The cases reach what they are for.
    lines = [line.split(None, 1) for line in done.stdout.splitlines()[1:]]
    counts = {line[1]: int(line[0]) for line in lines if line and line[0].isdigit()}
    assert sum(counts.values()) == cases
    assert all(counts.get(name) for name in seen), counts
