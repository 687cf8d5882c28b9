"""What the results of state on the host, and of copies behind ops, say."""

from __future__ import annotations

import json
import math
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
BYTES_PER_PARAMETER = 16  # parameter, gradient and two of AdamW, float32


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_training_under_the_limit():
    rows = load("state_offload")
    limit = rows[0]["limit_mib"]
    refused = [it for it in rows if it["way"] == "plain" and it["limited"]]
    assert refused
    assert all("allocate memory" in it["died"] or "MemoryError" in it["died"] for it in refused)
    ran = {it["way"]: it for it in rows if it["runs"]}
    assert set(ran) == {"plain", "memmap", "backward", "step", "copied", "disk"}
    for way, row in ran.items():
        assert row["equal"], way
        assert row["parameters"] * BYTES_PER_PARAMETER > limit * 2**20
        assert row["limited"] == (way != "plain")
        assert math.isfinite(row["step_s"])
        assert row["data_mib"] <= limit or way == "plain"
    # Updates in place copy nothing, and take what maps by hand do.
    assert max(ran["backward"]["of_plain"], ran["step"]["of_plain"]) < ran["copied"]["of_plain"]
    assert ran["backward"]["of_plain"] <= 1.05 * ran["memmap"]["of_plain"]


def test_copies_behind_ops():
    rows = load("offload_hidden")
    assert {it["model"] for it in rows} == {"vgg16", "unet"}
    assert all("modelled" in it["link"] for it in rows)
    copied = [it for it in rows if "hidden" in it]
    assert {it["model"] for it in copied} == {"vgg16", "unet"}
    assert min(it["hidden"] for it in copied if it["share"] > 0.8) >= 0.9
    # Nothing hides behind a link of a thousandth: ops run again, and nothing is copied.
    slow = [it for it in rows if it["rate"] < 0.01]
    assert slow
    assert all("moved_mib" not in it and it["recomputed"] for it in slow)
    for row in rows:
        assert row["peak_mib"] <= row["budget_mib"] + 1e-6
        assert 0 <= row.get("hidden", 1.0) <= 1
