"""The bench against torch's own tools: what is published, and its picture."""

import json
from pathlib import Path

import planner_torch_rivals as bench
import torch
from torch import nn

ROWS = Path(__file__).resolve().parents[2] / "benchmarks/results/planner_torch_rivals.json"


def test_published_plans_keep_the_rivals_peak_and_are_drawn(tmp_path):
    rows = json.loads(ROWS.read_text())
    ours = [row for row in rows if row["method"] == "sn_memory"]
    assert {row["model"] for row in ours} == set(bench.MODELS)
    assert all(row["peak_bytes"] <= row["setting"] for row in ours)
    bench.picture(rows, tmp_path / "rivals.png")
    assert (tmp_path / "rivals.png").stat().st_size > 10_000


def test_a_checkpointed_group_computes_the_same_and_runs_its_blocks_again():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    x = torch.randn(2, 8)
    assert bench.blocks_of(model) == blocks
    least = {}
    plainly = bench.measured(model, model, x, least)

    def run(x):
        with bench.checkpointed([blocks[:2], blocks[2:]]):
            return model(x)

    again = bench.measured(run, model, x, least)
    assert len(again[1]) > len(plainly[1])
    assert torch.equal(run(x), model(x))
