"""GPU figures of the documents are those of the results, and stand nowhere else."""

import json
import re
from pathlib import Path

import pytest

from gpu import report

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {
    "device": "cuda", "state": "ok", "why": "", "device_name": "NVIDIA Test 1", "torch": "9.9",
    "cupy": None, "commit": "abc",
}  # fmt: skip
ROWS = {
    "codec_seconds": [
        {"kind": "fused", "method": "fft theta 0.98", "encode_percent_of_bound": 51.2,
         "decode_percent_of_bound": 42.0, "encode_times_topk": 8.5,
         "encode_times_chunked_dct": 9.25},
    ],
    "sanitized": [{"tool": "memcheck", "clean": True}, {"tool": "racecheck", "clean": False}],
    "exchange_steps": [
        {"model": "resnet50", "ranks": 1, "backend": "nccl", "way": "plain", "step_ms": 3.0,
         "added_ms": 0.0, "launches": 12, "brought_bytes": 1_000_000},
    ],
    "host_waits": [{"step": "plain", "waited": ""}, {"step": "gather", "waited": "a copy"}],
    "gossip_steps": [{"model": "resnet50", "way": "plain", "step_ms": 1.0}],
    "horovod_ranks": [{"nccl": True}, {"ranks": 2, "way": "fft", "step_ms": 4.0}],
    "planned_steps": [
        {"model": "gpt2", "way": "planned, 75%", "predicted_bytes": 2**20, "peak_bytes": 2**20,
         "reserved_bytes": 2**21, "simulated_reserved_bytes": 3 * 2**20,
         "percent_off": 0.04, "step_ms": 7.0},
        {"model": "gpt2", "way": "offload, share of copies hidden", "hidden": 0.9},
    ],
    "activation_steps": [
        {"net": "cnn", "ratio": 8.0, "plain_peak_bytes": 2**21, "measured_peak_bytes": 2**20,
         "plain_step_s": 0.001, "step_s": 0.002},
    ],
}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """`results(device)`: a folder with a file of every section that is reported."""

    def write(device="cuda"):
        for name, rows in ROWS.items():
            found = ABOUT | {"section": name, "rows": rows, "device": device}
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        return tmp_path

    return write


@pytest.mark.parametrize("page", report.PAGES)
def test_pages_say_what_the_results_say(page):
    """Written anew from the files that are there, a page is what it is."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert report.put(text, report.PAGES[page](report.RESULTS)) == text, (
        "run: PYTHONPATH=.:benchmarks python -m gpu.report"
    )


def test_figures_come_from_the_files(results):
    folder = results()
    codec, exchange, planned = (make(folder) for make in report.PAGES.values())
    for said in ("| 50 % | 51.2 % |", "| 8.5 x |", "compute-sanitizer memcheck | clean | clean",
                 "racecheck | clean | FOUND SOMETHING", "NVIDIA Test 1, torch 9.9"):  # fmt: skip
        assert said in codec
    assert codec.count(report.NOT) == 1  # no row of the whole vector
    for said in ("| resnet50 | 1, nccl | plain | 3.00 | +0.00 | 12 | 1.00 |",
                 "| plain | nothing |", "| gather | a copy |", "| 2 | fft | 4.00 |"):  # fmt: skip
        assert said in exchange
    assert "| gpt2 | planned, 75% | 1 | 1 | 2 | 3 | +0.0 % | 7.0 |" in planned
    assert "| cnn | 8.0 | 2.0, 1.0 | 1.0, 2.0 |" in planned
    assert report.NOT not in exchange + planned


@pytest.mark.parametrize("make", report.PAGES.values(), ids=report.PAGES)
def test_what_was_not_measured_is_said_so(results, tmp_path, make):
    missing = make(tmp_path / "none")
    assert report.NOT in missing
    assert not re.search(r"\d\.\d", missing)
    # A dry run measures nothing, whatever its files hold.
    assert make(results("cpu")) == missing


def test_no_other_place_states_a_figure_of_a_device():
    """Between the markers a device is named as its driver names it, and nowhere else."""
    named = re.compile(r"NVIDIA (?:[A-Z]{1,3}\d+|GeForce|Tesla|RTX)")
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.relative_to(ROOT).as_posix() in report.PAGES:
            text = report.put(text, "")
        assert not named.search(text), page
