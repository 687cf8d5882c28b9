"""The studies of apoptosis in Keras and on ranks: rows resume, and the page says what rows say."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
import apoptosis_tensorflow as study
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/apoptosis.md").read_text(encoding="utf-8")
ROWS = json.loads(study.RESULTS.read_text(encoding="utf-8"))
RANKS = json.loads((ROOT / "benchmarks/results/apoptosis_ranks.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_rows():
    assert study.table(ROWS) in PAGE
    for row in ROWS:
        assert (row["widths"], row["plain_steps"], row["held_out"]) == ([1024, 1024], 2811, False)


def test_ranks_of_the_page_were_the_same_after_each_event():
    ranks = pytest.importorskip("apoptosis_ranks", reason="Horovod's torch is not built")
    assert ranks.table(RANKS) in PAGE
    for row in RANKS:
        assert row["ranks"] == 4
        assert row["compared"] >= max(1, row["events"])
    assert any(row["events"] for row in RANKS)


def test_only_what_is_missing_runs(monkeypatch, tmp_path, capsys):
    calls = []

    def run(method, seed, args):
        calls.append((method, seed))
        told = {name: getattr(args, name) for name in study.SETTINGS} if method != "plain" else {}
        return {
            "method": method, "seed": seed, "held_out": args.held_out, "widths": args.widths,
            "plain_steps": args.steps, **told, "score": 90.0, "parameters": 1000, "cpu_s": 8.0,
            "wall_s": 9.0, "curve_cpu_s": [4.0, 8.0], "curve_score": [80.0, 90.0],
        }  # fmt: skip

    monkeypatch.setattr(study, "run", run)
    # Another test may have started TensorFlow, which then takes no number of threads.
    for kind in ("intra", "inter"):
        name = f"set_{kind}_op_parallelism_threads"
        monkeypatch.setattr(study.tf.config.threading, name, lambda n: None)
    command = ["study", "--json", str(tmp_path / "rows.json"), "--seeds"]
    for seeds in (["0"], ["0", "1"]):
        monkeypatch.setattr(sys, "argv", [*command, *seeds])
        study.main()
    assert calls == [(method, seed) for seed in (0, 1) for method in ("plain", "apoptosis")]
    assert "| plain | 2 | 90.00 | 1,000 | 8.0 | 9.0 | 8.0 |" in capsys.readouterr().out


def test_held_out_rows_are_no_test_images(monkeypatch):
    every = [np.arange(60_000.0).reshape(-1, 1), np.zeros(60_000), np.ones((9, 1)), np.ones(9)]
    monkeypatch.setattr(study, "images", lambda seed: every)
    x, y, test_x, test_y = study.data(held_out=True)
    assert (len(x), len(y), len(test_x), len(test_y)) == (50_000, 50_000, 10_000, 10_000)
    assert test_x.min() == x.max() + 1
