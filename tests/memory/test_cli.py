"""The command line: a graph file in, a plan file out, errors in one line."""

import subprocess
import sys

from random_graphs import training_chain

from sn_memory import Plan
from sn_memory.cli.main import main


def test_plan_and_check(tmp_path, capsys):
    graph, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    training_chain(6).to_json(graph)
    assert main(["plan", str(graph), "--budget", "60%", "-o", str(plan), "--quiet"]) == 0
    assert "gap" in capsys.readouterr().out
    assert Plan.from_json(plan).peak_bytes <= Plan.from_json(plan).budget_bytes
    assert main(["check", str(graph), str(plan)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_errors_are_one_line(tmp_path, capsys):
    graph, plan = tmp_path / "graph.json", tmp_path / "plan.json"
    training_chain(3).to_json(graph)
    assert main(["plan", str(graph), "--budget", "10B", "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("BudgetError: the smallest peak found is ")
    graph.write_text('{\n"format": 3,\noops')
    assert main(["plan", str(graph), "--budget", "1GiB"]) == 1
    assert "line 3" in capsys.readouterr().err
    assert main(["check", str(graph), str(plan)]) == 1
    assert main(["check", str(tmp_path / "none.json"), str(plan)]) == 1


def test_budgets_are_bytes_or_text_and_anything_else_is_named(tmp_path, capsys):
    graph = tmp_path / "graph.json"
    training_chain(3).to_json(graph)
    assert main(["plan", str(graph), "--budget", "100000", "--quiet"]) == 0
    for odd in ("²", "", "9" * 400, "-1", "nan"):
        assert main(["plan", str(graph), f"--budget={odd}", "--quiet"]) == 1
        assert capsys.readouterr().err.startswith("ValueError: got size ")


def test_the_module_runs(tmp_path):
    graph = tmp_path / "graph.json"
    training_chain(3).to_json(graph)
    done = subprocess.run(
        [sys.executable, "-m", "sn_memory", "plan", str(graph), "--budget", "70%"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "peak" in done.stdout
    assert "best" in done.stderr
