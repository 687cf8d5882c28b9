"""Other people's architectures: right under a plan, or refused with a reason; none crashes.

The same networks as in the table of docs/torch_memory.md.
"""

import json
from pathlib import Path

import pytest
from planner_architectures import row_of, table

ROOT = Path(__file__).resolve().parents[2]

# Planned by modules: their course depends on values, or they raise under fake tensors.
BY_MODULES = {
    "Mixtral": "Expected inputs of BF16 type",
    "wav2vec2": "depend on values",
    "GAT": "nonzero",
}
# No plan keeps the budget, and the error says what was tried.
REFUSED = {"GCN": "BudgetError: run again module by module"}
# Equal but for rounding. Llama and its kin skip a mask of ones, when they may look at it, and then
# attention takes another kernel; in CLIP, sums of gradients are taken in another order.
ROUNDED = {"Llama", "Qwen3", "LoRA", "CLIP"}
BY_GRAPH = (
    *("GPT-2", "Llama", "Qwen3", "Mistral", "BERT", "RoBERTa", "T5", "BART", "ViT", "Swin"),
    *("Whisper", "CLIP", "Mamba", "UNet2DCondition", "DiT", "LoRA", "LSTM", "GRU", "GraphSAGE"),
)

# Where it reaches the budget, the planner that runs most again, as it is the quickest.
QUICK = dict.fromkeys(
    ("GPT-2", "BERT", "RoBERTa", "T5", "Mamba", "UNet2DCondition"), "superneurons_memory"
)
# What the libraries themselves warn about.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning")
]


def row(name):
    planner = QUICK.get(name, "auto")
    # In counted work where that can be, so that a busy machine plans no worse.
    counted = name in BY_GRAPH
    return row_of(name, profile=False, time_limit_s=0.5, planner=planner, deterministic=counted)


@pytest.mark.parametrize("name", BY_GRAPH)
def test_by_graph(name):
    found = row(name)
    assert found["chosen"] == "graph", found["reason"]
    assert found["predicted_bytes"] <= found["budget_bytes"]
    if name in ROUNDED:
        assert found["difference"] < 1e-6
        assert "but for rounding" in found["reason"]
    else:
        assert found["different"] == 0, found
        assert not found["reason"]
    # A model that does not return its loss leaves that out of the plan: a few scalars.
    assert 0 <= found["measured_bytes"] - found["predicted_bytes"] <= 64


@pytest.mark.parametrize("name", BY_MODULES)
def test_by_modules(name):
    found = row(name)
    assert found["chosen"] == "modules", found["reason"]
    assert found["different"] == 0, found
    assert found["measured_bytes"] <= found["budget_bytes"]
    assert BY_MODULES[name] in found["reason"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    found = row(name)
    assert found["chosen"] == "refused"
    assert REFUSED[name] in found["reason"]


def test_the_page_has_the_table():
    rows = json.loads((ROOT / "benchmarks/results/planner_architectures.json").read_text())
    assert {it["architecture"] for it in rows} == {*BY_GRAPH, *BY_MODULES, *REFUSED}
    assert table(rows) in (ROOT / "docs/torch_memory.md").read_text()
