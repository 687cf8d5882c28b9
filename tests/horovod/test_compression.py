"""The three compressions without processes: settings, dispatch, counting."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import get_type_hints

import numpy as np
import pytest

import sn_compress.settings as typed
from sn_compress import (
    AutoCompression,
    CastCompression,
    CompressError,
    FFTCodec,
    FFTCompression,
    LowRankCompression,
    report,
)
from sn_compress.compression import settings_of
from sn_compress.report import PayloadStats, Traffic
from sn_compress.schedule import Constant, Warmup

ALL = (FFTCompression, LowRankCompression, CastCompression, AutoCompression)


def test_using_makes_a_configured_class_and_leaves_the_bare_one_alone():
    ours = FFTCompression.using(theta=0.9, bits=6, mantissa=2)
    assert issubclass(ours, FFTCompression)
    assert ours.settings.codec(1).theta == 0.9
    assert FFTCompression.settings.theta == 0.9
    assert ours.using(block=None).settings.theta == 0.9


def test_paper_mode_is_the_papers_pipeline():
    settings = FFTCompression.using(mode="paper", theta=0.85).settings
    assert (settings.block, settings.positions, settings.half, settings.feedback) == (
        None, "bitmap", True, False,
    )  # fmt: skip
    assert settings.theta == 0.85


@pytest.mark.parametrize(("changes", "span"), [
    ({}, 64),
    ({"block": 64}, 64),
    ({"span": 256}, 256),
    ({"span": None}, None),
    ({"block": 32}, None),
    ({"block": None}, None),
    ({"transform": "dct"}, None),
    ({"mode": "paper"}, None),
])  # fmt: skip
def test_blocks_are_cut_into_spans_unless_what_is_asked_has_none(changes, span):
    settings = FFTCompression.using(**changes).settings
    assert settings.span == span
    assert settings.codec(1).span == span


@pytest.mark.parametrize(("change", "words"), [
    ({"theta": 1.0}, "theta"),
    ({"block": 1000}, "block"),
    ({"bits": 3}, "bits"),
    ({"bits": 8, "mantissa": 8}, "mantissa"),
    ({"min_elements": 0}, "min_elements"),
    ({"decay": 0.0}, "decay"),
    ({"mode": "best"}, "mode"),
    ({"topk": 3}, "no setting topk; FFTCompression has bits, block"),
    ({"exchange": "gather"}, "no setting exchange"),
    ({"tune": True}, "no setting tune"),
    ({"theta": "0.9"}, "theta='0.9'; expected a number or a schedule"),
    ({"theta": True}, "theta=True; expected a number"),
    ({"bits": 8.0}, "bits=8.0; expected a whole number"),
    ({"half": 1}, "half=1; expected True or False"),
    ({"transform": ["fft"]}, "expected 'fft' or 'dct'"),
    ({"block": "4096"}, "expected a whole number or None"),
    ({"wait_s": "60"}, "wait_s='60'; expected a number"),
    ({"span": 128, "transform": "dct"}, "span=128; expected"),
    ({"span": 128, "block": None}, "span=128; expected"),
    ({"span": 128, "block": 64}, "span=128; expected"),
])  # fmt: skip
def test_bad_settings_are_refused_when_given(change, words):
    with pytest.raises(CompressError, match=words):
        FFTCompression.using(**change)


@pytest.mark.parametrize(("compression", "change", "words"), [
    (LowRankCompression, {"theta": 0.9}, "theta belongs to FFTCompression; .*Use FFTCompr"),
    (AutoCompression, {"mode": "paper"}, "mode belongs to FFTCompression; AutoCompression has"),
    (LowRankCompression, {"threads": 2}, "threads belongs to FFTCompression"),
    (FFTCompression, {"ratio": 9}, "ratio belongs to LowRankCompression and AutoCompression"),
    (LowRankCompression, {"overlap": True}, "there is no setting overlap; LowRankCompression has"),
    (LowRankCompression, {"ratio": 1.0}, "ratio=1.0"),
    (LowRankCompression, {"ratio": "100"}, "ratio='100'; expected a number"),
    (AutoCompression, {"warmup": 2.5}, "warmup=2.5; expected a whole number"),
    (CastCompression, {"dtype": "fp4"}, "dtype='fp4'; expected 'fp16' or 'bf16' or 'fp8'"),
    (CastCompression, {"dtype": "fp8", "bits": 4}, "bits belongs to FFTCompression"),
    (CastCompression, {"feedback": False}, "feedback=False has no effect with dtype='bf16'"),
    (CastCompression, {"dtype": "fp16", "decay": 0.9}, "decay=0.9 has no effect with dtype='fp16"),
])  # fmt: skip
def test_what_a_class_does_not_take_is_refused_with_the_owner_of_the_setting(
    compression, change, words
):
    with pytest.raises(CompressError, match=words):
        compression.using(**change)


@pytest.mark.parametrize("compression", ALL)
def test_a_class_makes_no_object(compression):
    with pytest.raises(CompressError, match=rf"{compression.__name__}.using\(decay=0.5\)"):
        compression(decay=0.5)


SETTINGS = (
    (FFTCompression, {}),
    (FFTCompression, {"theta": 0.99, "block": None}),
    (FFTCompression, {"mode": "paper", "theta": Warmup(5, then=Constant(0.9))}),
    (LowRankCompression, {}),
    (LowRankCompression, {"ratio": np.float64(50.0)}),
    (AutoCompression, {"every": 9, "check_every": 0}),
    (CastCompression, {"dtype": "fp8"}),
)


@pytest.mark.parametrize(("compression", "changes"), SETTINGS)
def test_repr_is_the_call_and_classes_survive_pickle_and_copies(compression, changes):
    ours = compression.using(**changes)
    known = {cls.__name__: cls for cls in (*ALL, Warmup, Constant)} | {"np": np}
    again = eval(repr(ours), known)
    assert (again.settings, again.__name__) == (ours.settings, compression.__name__)
    assert repr(compression) == compression.__name__
    for one in (ours, compression):
        for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), copy.copy(one)):
            assert issubclass(again, compression)
            assert again.settings == again.using().settings == one.settings
    assert pickle.loads(pickle.dumps(compression)) is compression


def test_repr_leaves_out_what_is_as_it_always_is():
    assert repr(FFTCompression.using(theta=0.99)) == "FFTCompression.using(theta=0.99)"


def test_keywords_have_the_types_of_the_settings():
    record = get_type_hints(typed.Settings)
    each = typed.FFTSettings, typed.LowRankSettings, typed.CastSettings, typed.AutoSettings
    for keywords in each:
        own = get_type_hints(keywords)
        own.pop("mode", None)
        assert own == {name: record[name] for name in own}
    every = {name for keywords in each for name in get_type_hints(keywords)}
    assert set(record) == {"compression"} | every - {"mode"}


@pytest.mark.parametrize("wrong", ["fft", None, FFTCompression.settings, int, 3])
def test_what_is_no_compression_of_ours_is_named(wrong):
    with pytest.raises(CompressError, match=r"^here got .* expected FFTCompression, LowRank"):
        settings_of(wrong, "here")


def test_decompress_takes_a_missing_context():
    """Horovod passes ctx None for sparse gradients."""
    assert FFTCompression.decompress("as it is", None) == "as it is"


def test_traffic_counts_steps_by_the_return_of_a_name():
    codec, traffic = FFTCodec(theta=0.9), Traffic()
    assert traffic.report()["ratio"] == 0.0
    rng = np.random.default_rng(0)
    for _ in range(3):
        for name in ("a", "b"):
            payload = codec.encode(rng.standard_normal(8192, dtype=np.float32))
            traffic.payload(name, 8192, PayloadStats.of([payload]))
        traffic.plain("bias", 10, 40)
    report = traffic.report()
    assert report["steps"] == 3
    assert report["tensors"] == 2
    assert report["dense_bytes"] == 4 * (2 * 8192 + 10)
    assert report["payload_bytes"] == 2 * codec.payload_bytes(8192) + 40
    assert report["ratio_after_warmup"] == report["ratio"]
    for _ in range(2):  # plain for good, and nothing of it is after the warm-up
        for name in ("a", "b", "bias"):
            traffic.plain(name, 10, 40)
    assert traffic.report()["ratio_after_warmup"] == report["ratio"] > traffic.report()["ratio"]
    # White noise, the tenth of the bins with the largest magnitude: section 7 of the facts
    # derives 33.0 % of the energy for complex bins, so sqrt(0.67) remains.
    assert report["relative_error"] == pytest.approx(0.67**0.5, abs=0.02)


def test_traffic_of_graphs_is_settled_where_something_was_compressed():
    traffic = Traffic()
    one = report.TensorTraffic("a", 100, 400, 400, "plain", 3)
    traffic.ran(3, [one], (0.0, 0.0))
    assert traffic.report()["ratio_after_warmup"] == 0
    small = report.TensorTraffic("a", 100, 400, 40, "low_rank", 5)
    traffic.ran(5, [small, report.TensorTraffic("bias", 10, 40, 40, "plain", 5)], (0.0, 0.0))
    assert traffic.report()["ratio_after_warmup"] == pytest.approx(440 / 80)
    assert traffic.report()["ratio"] == pytest.approx((3 * 400 + 5 * 440) / (3 * 400 + 5 * 80))
    traffic.fixed("vector", 10, 40)  # in every step
    assert traffic.report()["ratio_after_warmup"] == pytest.approx(480 / 120)


def test_traffic_says_what_travels_how(caplog):
    """In the report, and in a line of the rank that speaks, when chosen and when it changes."""
    caplog.set_level(logging.INFO, "sn_compress.report")
    loud, quiet = Traffic(), Traffic()
    quiet.logs = False
    payload = FFTCodec(theta=0.9).encode(np.ones(4096, np.float32))
    for traffic in (loud, quiet):
        for step in range(6):
            for name, way in (("a", "low_rank"), ("b", "low_rank"), ("c", "rows"), ("d", "whole")):
                if step in (0, 1, 4):  # its own dense steps: the choice stays what it was
                    traffic.dense(name, 100, 400)
                else:
                    traffic.shared(name, 100, 20, 1.0, 0.5, method=way)
            traffic.plain("bias", 10, 40)
            traffic.payload("kernel", 4096, PayloadStats.of([payload]))
        found = {way: traffic.report()[way] for way in report.METHODS if traffic.report()[way]}
        assert found == {"low_rank": 2, "rows": 1, "frequencies": 1, "whole": 1, "plain": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "gradients travel as: 1 frequencies, 5 plain",
        "gradients travel as: 2 low rank, 1 rows, 1 frequencies, 1 whole, 1 plain",
    ]
    traffic.plain("a", 100, 400)  # given up for good
    assert traffic.report()["low_rank"] == 1
