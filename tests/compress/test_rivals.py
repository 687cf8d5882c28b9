"""Each rival against a plain implementation of its definition, and what its authors promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from samples import U, plain_top, random, rows_of

from sn_compress import Payload, PayloadError, codec
from sn_compress.ops import codes

# QSGD and TernGrad.


def words(seed, step, n):
    return codes.uniform_words(seed, step, n).astype(np.float64) * 2.0**-32


@pytest.mark.parametrize(("levels", "bucket", "norm"), [
    (1, None, "max"), (7, 32, "l2"), (256, 50, "max"), (32767, None, "l2"),
])  # fmt: skip
def test_qsgd_is_its_definition(levels, bucket, norm):
    x = random(200)
    made = codec("qsgd", levels=levels, bucket=bucket, norm=norm, seed=9)
    state = made.new_state(200)
    state[0][0] = 4
    # Random numbers go along the rows of the buckets, the last filled up.
    luck = iter(words(9, 4, 300))
    expected = []
    for row in rows_of(x, bucket):
        exact = row.astype(float)
        scale = float(np.float32(np.linalg.norm(exact) if norm == "l2" else abs(exact).max()))
        for value in exact:
            level = levels * abs(value) / scale
            q = math.floor(level) + (next(luck) < level - math.floor(level))
            expected.append(math.copysign(q * scale / levels, value))
    found = made.decode(made.encode(x, state=state))
    # NumPy adds squares in another order than the norm here, and the result is rounded once.
    assert np.allclose(found, np.array(expected), rtol=2 * U, atol=0)
    assert state[0][0] == 5


@pytest.mark.parametrize(("bucket", "clip", "spread"), [
    (None, 2.5, "std"), (None, None, "rms"), (60, 2.5, "rms"), (60, None, "std"),
])  # fmt: skip
def test_terngrad_is_its_definition(bucket, clip, spread):
    x = random(200)
    made = codec("terngrad", clip=clip, spread=spread, bucket=bucket, seed=3)
    luck = iter(words(3, 0, 240))
    expected = []
    for row in rows_of(x, bucket):
        exact = row.astype(float)
        middle = exact.mean() if spread == "std" else 0.0
        limit = np.inf if clip is None else clip * math.sqrt(np.mean((exact - middle) ** 2))
        size = np.minimum(abs(exact), np.float32(min(limit, 3e38)).astype(float))
        top = size.max()
        for value, magnitude in zip(exact, size, strict=True):
            kept = next(luck) < magnitude / top
            expected.append(math.copysign(top, value) if kept else 0.0)
    found = made.decode(made.encode(x))
    # Only the clipping limit is rounded, and its sum taken in another order.
    assert np.allclose(found, np.array(expected), rtol=2 * U, atol=0)


def test_equal_values_survive_terngrad_about_zero_and_not_about_the_mean():
    x = np.full(100, 0.3, np.float32)
    ours, theirs = codec("terngrad"), codec("terngrad", preset="grace")
    assert np.array_equal(ours.decode(ours.encode(x)), x)
    assert np.abs(theirs.decode(theirs.encode(x))).max() < 1e-6


# Top-k.


@pytest.mark.parametrize(("theta", "chunk", "indices"), [
    (0.0, None, "int32"), (0.7, None, "int64"), (0.9, 64, "int64"), (0.99, 64, "int32"),
    (0.0, 64, "packed"), (0.9, 64, "packed"),
])  # fmt: skip
def test_topk_is_its_definition(theta, chunk, indices):
    x = np.round(random(1000) * 4).astype(np.float32) / 4  # with many ties
    made = codec("topk", theta=theta, chunk=chunk, indices=indices)
    expected = np.zeros(1000, np.float32)
    for start, row in zip(itertools.count(0, chunk or 1000), rows_of(x, chunk), strict=False):
        for i in plain_top(row, max(1, int(round((1 - theta) * len(row), 9)))):
            expected[start + i] = row[i]
    assert np.array_equal(made.decode(made.encode(x)), expected)


def test_theta_counts_in_decimals_as_written():
    for theta, n, k in ((0.99, 1000, 10), (0.9, 1000, 100), (0.7, 10, 3), (0.999, 10, 1)):
        assert codec("topk", theta=theta).kept(n) == k


def test_two_bit_values_are_the_means_of_four_bins():
    x = random(4096)
    made = codec("topk", preset="compact")
    state = made.new_state(4096)
    found = made.decode(made.encode(x, state=state))
    top = plain_top(x, 64)
    kept = x[top].astype(float)
    edges = kept.mean() + np.array([-1.5, 0, 1.5]) * kept.std()
    places = np.searchsorted(edges, kept, side="right")
    for i, place in zip(top, places, strict=True):
        # A sum of at most 64 numbers in another order, in float64, then one rounding.
        assert found[i] == pytest.approx(kept[places == place].mean(), rel=2 * U)
    assert np.count_nonzero(found) == 64
    assert np.array_equal(state[0], x - found)


def test_halves_are_clipped_counted_and_made_up_for():
    x = np.array([1e6, 0.5, -2e5, 0.25], np.float32)
    made = codec("topk", theta=0.5, values="fp16")
    state = made.new_state(4)
    payload = made.encode(x, state=state)
    assert payload.saturated == 2
    assert made.decode(payload).tolist() == [65504, 0, -65504, 0]
    assert state[0].tolist() == [1e6 - 65504, 0.5, -2e5 + 65504, 0.25]


# One bit.


@pytest.mark.parametrize(("variant", "bucket", "packing"), [
    ("1bit", None, "bits"), ("1bit", 60, "bytes"), ("ef-sign", None, "bytes"),
    ("ef-sign", 60, "bits"),
])  # fmt: skip
def test_onebit_is_its_definition_over_steps(variant, bucket, packing):
    made = codec("onebit", variant=variant, bucket=bucket, packing=packing)
    state = made.new_state(200)
    e = np.zeros(200, np.float32)
    for step in range(4):
        acc = random(200, step) + e
        expected = []
        for row in rows_of(acc, bucket):
            exact = row.astype(float)
            if variant == "ef-sign":
                high = np.abs(exact).mean()
                low = -high
            else:
                low, high = (exact[of].sum() / max(of.sum(), 1) for of in (exact < 0, exact >= 0))
            expected += [low if value < 0 else high for value in exact]
        found = made.decode(made.encode(random(200, step), state=state))
        # Sums in float64 in another order, then one rounding.
        assert np.allclose(found, np.array(expected), rtol=2 * U, atol=0)
        e = acc - found
        assert np.array_equal(state[0], e)


# Casts.


def test_casts_beyond_their_range_give_inf_and_count():
    fp16, bf16 = codec("fp16"), codec("bf16")
    x = np.array([65504, 65519, 65520, -1e6, np.nan, np.inf], np.float32)
    payload = fp16.encode(x)
    assert payload.saturated == 2
    assert fp16.decode(payload)[:4].tolist() == [65504, 65504, math.inf, -math.inf]
    assert np.isnan(fp16.decode(payload)[4])
    top = np.array([np.finfo(np.float32).max], np.float32)
    assert bf16.decode(bf16.encode(top)).tolist() == [math.inf]
    quiet = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bf16.decode(bf16.encode(quiet))).all()


# What a decoder refuses, and what NaN reaches.

FOREIGN = [
    # Codec, settings, the byte of the body that is changed, what is put there, what is said.
    ("qsgd", {"levels": 1}, 4, 0b11, "code 3; 1 levels end at 2"),
    ("qsgd", {"levels": 7, "packing": "bytes"}, 4, 15, "code 15"),
    ("qsgd", {}, 3, 0xBF, "negative"),
    ("terngrad", {"packing": "bits"}, 4, 0b11, "code 3"),
    ("terngrad", {"packing": "bytes"}, 4, 3, "code 3"),
    ("terngrad", {}, 4, 243, "at most 242"),
    ("terngrad", {}, 3, 0xBF, "negative"),
    ("onebit", {"packing": "bytes"}, 8, 2, "sign 2; expected 0 or 1"),
]


def forged(payload, place, data):
    """The payload with other bytes in its body, and a checksum that is right."""
    buffer = payload.buffer.copy()
    buffer[32 + place : 32 + place + len(data)] = data
    ids = {"codec_id": payload.codec_id, "n": payload.n, "settings": payload.settings}
    return Payload.seal(buffer, **ids)


@pytest.mark.parametrize(("name", "settings", "place", "byte", "message"), FOREIGN)
def test_codes_that_no_encoder_makes_are_refused(name, settings, place, byte, message):
    made = codec(name, **settings)
    payload = made.encode(np.ones(4, np.float32))
    with pytest.raises(PayloadError, match=message):
        made.decode(forged(payload, place, [byte]))


def test_indices_that_do_not_ascend_are_refused():
    made = codec("topk", theta=0.5, indices="int64")
    payload = made.encode(np.array([1, 2, 3, 4], np.float32))
    for wrong in ([3, 2], [2, 2], [2, 4], [-1, 2], [2**62, 2]):
        with pytest.raises(PayloadError, match="ascend"):
            made.decode(forged(payload, 8, np.array(wrong, "<i8").view(np.uint8)))


@pytest.mark.parametrize("values", ["fp32", "fp16", "2bit"])
def test_one_nan_in_a_sparse_payload_reaches_every_element(values):
    """Also when a peer made it up: one of four table entries, one of many values."""
    made = codec("topk", theta=0.5, values=values)
    x = np.arange(64, dtype=np.float32)
    y = made.decode(made.encode(np.where(x == 9, np.nan, x).astype(np.float32)))
    assert np.isnan(y).all()
    assert np.isnan(made.decode(forged(made.encode(x), 0, [0xFF] * 4))).all()


def test_a_bad_bucket_leaves_the_others_alone():
    x = random(96)
    x[40] = np.nan
    for name in ("qsgd", "terngrad", "onebit"):
        made = codec(name, bucket=32)
        y = made.decode(made.encode(x, state=made.new_state(96)))
        assert (np.isnan(y) == (np.arange(96) // 32 == 1)).all()


def test_a_norm_beyond_float32_is_held_at_its_end():
    """Four elements at the top have twice its norm; they are then exact, as no norm is smaller."""
    top = np.finfo(np.float32).max
    x = np.array([top, -top, top, -top], np.float32)
    made = codec("qsgd", levels=7, bucket=None)
    assert np.array_equal(made.decode(made.encode(x)), x)


# Chance that can be drawn again, and bytes.


def test_chance_depends_on_seed_step_and_position_only():
    first = codes.uniform_words(3, 5, 100)
    assert np.array_equal(first[:33], codes.uniform_words(3, 5, 33))
    for seed, step in ((4, 5), (3, 6), (5, 3)):
        assert not np.array_equal(first, codes.uniform_words(seed, step, 100))


def test_chance_is_the_same_in_every_version():
    """The stream is a promise of NumPy's; a change would make old runs impossible to repeat."""
    assert codes.uniform_words(1, 2, 4).tolist() == [3042142985, 1328497427, 564130602, 1533115363]
    certain = np.array([0.0, 1.0] * 5000)
    assert np.array_equal(codes.happens(certain, 0, 0), certain == 1)
