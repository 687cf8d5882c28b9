"""README: short, and its table of where compression pays is what `predict` says."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from sn_compress.prediction.rates import RECORDED

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
RESULTS = ROOT / "benchmarks/results/pays.json"
MOST_LINES = 120
CLOSE = 0.15


@pytest.fixture(scope="module")
def pays():
    """benchmarks/pays.py, with its neighbours."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("pays", ROOT / "benchmarks/pays.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def test_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_its_tables_are_what_predict_says(pays):
    shown = README.partition(f"{pays.START}\n")[2].partition(f"\n{pays.END}")[0]
    assert shown == pays.tables(), "run: python benchmarks/pays.py --write"


ROWS = json.loads(RESULTS.read_text("utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['gbit']} {row['way']}")
def test_predicted_steps_are_close_to_measured_ones(row):
    assert row["predicted_s"] == pytest.approx(row["step_s"], rel=CLOSE)


def test_both_links_and_both_kinds_of_exchange_were_measured():
    found = {(row["gbit"], row["way"]) for row in ROWS}
    assert {(gbit, way) for gbit in (0.1, 1.0) for way in ("plain", "low rank 100", "gather")} <= found
