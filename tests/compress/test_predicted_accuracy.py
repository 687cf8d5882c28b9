"""What `predict` says of accuracy is what the committed study measured."""

import json
import statistics
from pathlib import Path

import pytest

from sn_compress import Link, predict
from sn_compress.prediction import predict as accuracy
from sn_compress.prediction.cost import layers

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
METHOD = {
    "LowRankCompression": "auto",  # the oldest rows' name
    "AutoCompression": "auto frequencies",
    "FFTCompression": "fft",
}
NETS = {"convolutional net": ("cnn", "sgd"), "transformer": ("transformer", "adam")}
NETS |= {"residual net": ("residual", "sgd"), "net of a million parameters": ("wide", "sgd")}


def rows():
    for name in ("study", "study_unseen"):
        yield from json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def studied(method, net, optimizer, ratio):
    """Points lost of each seed."""
    own = [
        row
        for row in rows()
        if (row["net"], row["optimizer"], row.get("ranks", 8)) == (net, optimizer, 8)
    ]
    plain = {row["seed"]: row["accuracy"] for row in own if row["method"] == "plain"}
    return [
        plain[row["seed"]] - row["accuracy"]
        for row in own
        if (row["method"], row["ratio_asked"]) == (method, ratio)
    ]


@pytest.mark.parametrize("lost", accuracy.MEASURED, ids=str)
def test_the_table_is_what_was_measured(lost):
    found = studied(METHOD[lost.compression], *NETS[lost.net], lost.ratio)
    assert len(found) == lost.seeds
    assert statistics.fmean(found) == pytest.approx(lost.points, abs=0.0051)


def test_no_measured_loss_above_the_limit_is_left_out():
    known = {(it.compression, it.net, it.ratio) for it in accuracy.MEASURED}
    for compression, method in METHOD.items():
        for net, where in NETS.items():
            for ratio in (20.0, 50.0, 150.0):
                found = studied(method, *where, ratio)
                if len(found) > 1 and statistics.fmean(found) > accuracy.LIMIT:
                    assert (compression, net, ratio) in known


def test_the_ratio_to_take():
    assert accuracy.within("AutoCompression") == 20
    assert accuracy.within("LowRankCompression") is None  # 20 loses more on the residual net
    assert accuracy.within("LowRankCompression", points=1.0) == 20
    assert accuracy.within("FFTCompression") == 20
    assert accuracy.worst("AutoCompression", 10) is None
    worst = accuracy.worst("LowRankCompression", 400)
    assert (worst.ratio, worst.points) == (150, 0.76)


def test_predict_says_it():
    result = predict(layers("resnet50"), ranks=8, link=Link.of_gbit(10))
    said = result.table().splitlines()
    at = said.index("lost most in short trainings of small nets on 8 ranks:")
    assert any("AutoCompression: 1.07 points at 50x" in line for line in said[at:])
    assert any("at most 0.5 at ratio=20" in line for line in said[at:])
    fft = [line for line in said[at:] if "FFTCompression" in line]
    assert all("ratio=" not in line for line in fft), "it has no such setting"
