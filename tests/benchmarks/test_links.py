"""Steps on published GPUs and links, computed: the rows, the page made of them, and who wins."""

import json
from pathlib import Path

import links
import pytest
from published import GPUS, WIRES, Gpu
from travel import Script

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/links.json").read_text())
BIG = 10**8  # elements


def scripts(shared_s, words):
    """A net of one tensor: plain, and low rank with a codec of so many seconds."""
    return {
        "plain": [Script("w", [("allreduce", BIG, "<f4")], [0.0, 0.0])],
        "shared": [Script("w", [("allreduce", words, "<f4")], [shared_s, 0.0])],
    }


def test_a_step_is_computing_and_bytes_over_the_link():
    """4e8 bytes, 7/4 of them over 1.25 GB/s: 0.56 s; three collectives' latency is below 0.02 s."""
    of = Gpu("alexnet", 1, 0.2, "fp32", "made up")
    row = links.row(of, "p100", "10gbe", "plain", scripts(0, 1))
    assert row["free_s"] == pytest.approx(0.76, abs=0.02)
    assert row["core_s"] == row["free_s"]
    # Beside a backward pass that hands over its one tensor at its end, nothing is hidden.
    assert row["free_beside_s"] == row["free_s"]


def test_auto_is_plain_where_a_cores_codec_does_not_pay():
    of = Gpu("alexnet", 1, 0.2, "fp32", "made up")
    both = {
        way: links.row(of, "p100", "10gbe", way, scripts(5.0, 10**6))
        for way in ("plain", "shared", "auto")
    }
    assert both["auto"]["core_s"] == both["plain"]["core_s"] < both["shared"]["core_s"]
    assert both["auto"]["free_s"] == both["shared"]["free_s"] < both["plain"]["free_s"]


def test_a_winner_is_told_with_the_best_of_the_others():
    seconds = dict.fromkeys(links.NAMES, 2.0)
    assert links._winner(seconds) == "plain"
    assert links._winner(seconds | {"shared": 1.99}) == "plain", "2 % is no win"
    assert links._winner(seconds | {"topk": 1.0}) == "Top-k 1 % 2.00, ours 1.00"
    told = links._winner(seconds | {"gather": 1.0, "qsgd": 1.25})
    assert told == "`FFTCompression` 2.00, rivals 1.60"


def test_all_pairs_have_all_methods():
    pairs = {(gpu, of.model) for gpu, steps in GPUS.items() for of in steps}
    found = [(row["gpu"], row["model"], row["link"], row["method"]) for row in ROWS]
    wanted = {(*pair, wire, way) for pair in pairs for wire in WIRES for way in links.NAMES}
    assert set(found) == wanted
    assert len(found) == len(wanted)


def test_no_row_beats_computing_nor_the_bytes():
    for row in ROWS:
        assert row["free_beside_s"] <= row["free_s"] * 1.001
        assert row["compute_s"] <= row["free_beside_s"]
        assert row["core_s"] >= row["free_s"] - 1e-5
        if row["method"] not in ("plain", "auto"):
            assert row["core_s"] >= row["compute_s"] + row["codec_s"] * 0.99


def test_the_page_shows_the_rows():
    text = (ROOT / "docs/network.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- links:start -->\n")[2].partition("\n<!-- links:end -->")[0]
    assert shown == links.page(ROWS).rstrip()
