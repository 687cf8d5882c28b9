"""The simulated step: closed forms where there are any, and messages one by one where not."""

from __future__ import annotations

import json

import gossip_scale
import numpy as np
import pytest
from gossip_scale import errors, picture, table

from sn_compress.gossip import topology

ROWS = json.loads(gossip_scale.RESULTS.read_text(encoding="utf-8"))
MEASURED = json.loads(gossip_scale.MEASURED.read_text(encoding="utf-8"))
PAGE = gossip_scale.ROOT / "docs/gossip.md"
SETTING = gossip_scale.Setting(
    model_bytes=100.0,
    coded_bytes=4.0,
    bytes_per_s=50.0,
    latency_s=0.01,
    beside_s={"gossip": 0.1, "gossip, top-k": 0.5},
)


@pytest.mark.parametrize("ranks", [4, 6, 32])
@pytest.mark.parametrize(("compute_s", "method", "expected"), [
    (5.0, "gossip", 5.1),  # the message of 2 s hides behind computing
    (1.0, "gossip", 2.0 + 0.01 + 0.1),  # and here computing behind the message
    (1.0, "gossip, top-k", 1.5),
])  # fmt: skip
def test_a_step_of_equal_ranks(ranks, compute_s, method, expected):
    seconds = gossip_scale.computing(ranks, 50, compute_s, 1.0, 0.0)
    assert gossip_scale.gossip_s(seconds, SETTING, method) == pytest.approx(expected)


def test_a_slow_rank_sets_the_pace_of_all():
    seconds = gossip_scale.computing(8, 100, 5.0, 1.5, 0.0)
    assert gossip_scale.gossip_s(seconds, SETTING, "gossip") == pytest.approx(7.6, rel=1e-3)
    # A third of computing goes before 2 * 7 / 8 models of 2 s, and 3 collectives of 14 messages.
    expected = 7.5 / 3 + 1.75 * 2 + 3 * 14 * 0.01
    assert gossip_scale.all_reduce_s(seconds, SETTING) == pytest.approx(max(expected, 7.5))


@pytest.mark.parametrize("ranks", [5, 8])
def test_messages_one_by_one(ranks):
    """The recurrence by arrays is that of single ranks waiting for single messages."""
    steps, link_s = 40, 2.0
    seconds = gossip_scale.computing(ranks, steps, 2.0, 1.0, 0.5)
    graph = topology("dissemination", ranks)
    ends, out, in_ = [[0.0] * ranks], [0.0] * ranks, [0.0] * ranks
    for step in range(steps):
        arrives = {}
        for rank in range(ranks):
            source = graph.partner(rank, step).source
            arrives[rank] = max(ends[-1][source], out[source], in_[rank]) + link_s
        for rank, when in arrives.items():
            in_[rank] = out[graph.partner(rank, step).source] = when
        ends.append(
            [
                max(ends[-1][rank] + seconds[step, rank], arrives[rank] + 0.01) + 0.1
                for rank in range(ranks)
            ]
        )
    first = steps // 5
    expected = (np.mean(ends[-1]) - np.mean(ends[first])) / (steps - first)
    assert gossip_scale.gossip_s(seconds, SETTING, "gossip") == pytest.approx(expected)
    assert expected > 2.2, "ranks were to wait for each other"


def test_measuring_the_spread_makes_ranks_wait():
    seconds = gossip_scale.computing(8, 200, 5.0, 1.0, 0.5)
    plain = gossip_scale.gossip_s(seconds, SETTING, "gossip")
    assert gossip_scale.gossip_s(seconds, SETTING, "gossip, every=10") > plain


def test_stored_rows_are_what_the_measured_ones_give():
    setting = gossip_scale.setting_of(MEASURED, ROWS[0]["latency_s"])
    for row in (row for row in ROWS if row["ranks"] <= 8):
        told = gossip_scale.simulate(
            row["ranks"], row["method"], row["compute_s"], row["slow"], row["jitter"], setting,
            row["steps"],
        )  # fmt: skip
        assert told["step_s"] == pytest.approx(row["step_s"], abs=1e-4)


def test_measured_rows_are_predicted_and_shown():
    told = errors(ROWS, MEASURED)
    cells = [line.split("|") for line in told.splitlines() if " %" in line]
    off = {(c[1].strip(), c[2].strip(), c[3].strip()): float(c[-2].split()[0]) for c in cells}
    assert len(off) == len(MEASURED) - 3
    # Without a codec, behind a link slower than computing, gossip is slower than simulated; the
    # page says so.
    for slow, most in (("none", 10), ("1.5x", 17)):
        assert abs(off.pop(("gossip", "4.79", slow))) < most
    assert max(map(abs, off.values())) < 7
    page = PAGE.read_text(encoding="utf-8")
    for line in (told + "\n" + table(ROWS)).splitlines():
        assert line in page, line


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture(ROWS, MEASURED, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
