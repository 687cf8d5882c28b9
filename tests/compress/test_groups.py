"""Groups on grids: C++ and NumPy agree bit by bit, grids are as fine as said, chance is fair."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sn_compress import _native
from sn_compress.ops import groups

SIZES = (0, 1, 31, 32, 33, 63, 1000, 2**20 + 1)
KEY = (0x12345678, 0x9ABCDEF0)


def vectors(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n).astype(np.float32)
    holes = x.copy()
    holes[rng.random(n) < 0.3] = 0
    bad = x.copy()
    bad[: n // 3 : 7] = np.nan
    bad[1 : n // 2 : 31] = -np.inf
    bad[5::97] = 3e38
    return {
        "normal": x,
        "half zeros": np.maximum(x, 0),
        "negative": -np.maximum(x, 0),
        "holes": holes,
        "far from zero": x + np.float32(1000),
        "wide": x * np.float32(10) ** (np.arange(n) % 60 - 30).astype(np.float32),
        "denormal": (np.arange(n) % 7 - 3).astype(np.float32) * np.float32(2.0**-149),
        "all equal": np.full(n, 0.3, np.float32),
        "zeros": np.zeros(n, np.float32),
        "not finite": bad,
        "all NaN": np.full(n, np.nan, np.float32),
    }


def unpacked(kept: groups.Grids, n: int, bits: int, group: int) -> np.ndarray:
    return groups.unpack(kept.bases, kept.steps, kept.codes, n, bits, group)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_both_back_ends_give_the_same_bits(core, monkeypatch, n, bits):
    # The long one in one group only: NumPy takes a second for each.
    for group in (256,) if n > 2000 else (32, 256, 65536):
        for name, x in vectors(n).items():
            for bound in (math.inf, 0.3, 1e-3):
                monkeypatch.setattr(_native, "core", lambda: core)
                ours = groups.pack(x, bits, group, bound, KEY)
                values = unpacked(ours, n, bits, group)
                monkeypatch.setattr(_native, "core", lambda: None)
                twin = groups.pack(x, bits, group, bound, KEY)
                for field in ours._fields:
                    same = getattr(ours, field).tobytes() == getattr(twin, field).tobytes()
                    assert same, (field, name, group, bound)
                assert values.tobytes() == unpacked(twin, n, bits, group).tobytes()
            if n > 2000:
                break


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_floats_of_two_bytes_are_packed_as_their_values(core, monkeypatch, kind):
    """All 65,536 of them, in random order and sorted, and back again."""
    words = np.arange(2**16, dtype=np.uint16)
    for order in (words, np.random.default_rng(0).permutation(words)):
        values = order.view(np.float16) if kind == "float16" else order
        with np.errstate(invalid="ignore"):
            wide = (
                values.astype(np.float32)
                if kind == "float16"
                else (values.astype(np.uint32) << 16).view(np.float32)
            )
        for bits in groups.WIDTHS:
            for native in (core, None):
                monkeypatch.setattr(_native, "core", lambda native=native: native)
                kept = groups.pack(values, bits, 256, math.inf, KEY)
                expected = groups.pack(wide, bits, 256, math.inf, KEY)
                for field in kept._fields:
                    ours, theirs = getattr(kept, field), getattr(expected, field)
                    # NaN among what escapes may have other bits than before.
                    equal_nan = field == "values"
                    assert np.array_equal(ours, theirs, equal_nan=equal_nan), (field, bits, native)
                back = np.empty_like(values)
                groups.unpack(*kept[:2], kept.codes, values.size, bits, 256, out=back)
                dtype = getattr(torch, kind)
                ours = torch.from_numpy(back.view(np.int16)).view(dtype)
                full = torch.from_numpy(unpacked(kept, values.size, bits, 256)).to(dtype)
                assert torch.equal(ours.nan_to_num(), full.nan_to_num())
                assert torch.equal(ours.isnan(), full.isnan())


def test_threads_change_nothing(backend):
    n = 3 * 2**18 + 77
    x = vectors(n)["not finite"]
    one = groups.pack(x, 4, 256, 0.5, KEY, threads=1)
    three = groups.pack(x, 4, 256, 0.5, KEY, threads=3)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, three, strict=True))
    assert (np.diff(one.at) > 0).all()


@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_grids_are_as_fine_as_the_values_allow(backend, bits):
    top = 2**bits - 1
    for name, x in vectors(1000).items():
        kept = groups.pack(x, bits, 32, math.inf, KEY)
        steps = groups.step_values(kept.steps)
        for g, step in enumerate(steps):
            row = x[32 * g : 32 * g + 32].astype(float)
            row = row[np.abs(row) < 2.0**120]
            if not row.size:
                continue
            low, high = row.min(), row.max()
            # A grid through zero loses one point at most; rounding up to 8 bits loses 1/128.
            through_zero = (row == 0).any() and low < 0 < high
            points = max(top - 1, 1) if through_zero else top
            widest = max((high - low) / points, 2.0**-110)
            assert step <= widest * (1 + 2.0**-7) * (1 + 2.0**-20), name
        if bits > 1:
            fit = np.abs(x) < 2.0**120
            assert np.array_equal(np.flatnonzero(~fit), kept.at), name


def test_words_are_fair_and_do_not_depend_on_their_neighbours():
    """Each check is off by six deviations with probability 2e-9."""
    n = 2**20
    words = groups.random_words(0, n, groups.keys(3, 1))
    for bit in range(32):
        ones = int((words >> bit & 1).sum())
        assert abs(ones - n / 2) < 6 * math.sqrt(n) / 2, bit
    u = words / 2.0**32 - 0.5
    others = {
        "next": u[1:],
        "next group": u[256:],
        "next step": groups.random_words(0, n, groups.keys(3, 2)) / 2.0**32 - 0.5,
        "next seed": groups.random_words(0, n, groups.keys(4, 1)) / 2.0**32 - 0.5,
        "beyond 32 bits": groups.random_words(2**32, n, groups.keys(3, 1)) / 2.0**32 - 0.5,
    }
    for name, other in others.items():
        products = u[: other.size] * other
        # Of independent uniform numbers, a product has the deviation 1/12.
        assert abs(products.sum()) < 6 * math.sqrt(other.size) / 12, name


@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_variance_is_that_of_the_errors(backend, bits):
    """Of 2**18 squared errors the mean is off by six of its own deviations, at 2e-9."""
    n = 2**18
    for name in ("normal", "half zeros"):
        x = vectors(n)[name]
        kept = groups.pack(x, bits, 256, math.inf, KEY)
        squared = np.square(unpacked(kept, n, bits, 256).astype(float) - x)
        # g is rounded to 1/256: g (256 - g) is off by 1/2 of 256 at most, but 1/6 on average.
        slack = 6 * squared.std() / math.sqrt(n) + 2.0**-9 * squared.mean()
        assert abs(kept.variance(n) - squared.mean()) < slack, name


def test_buffers_that_do_not_belong_together_are_refused(core):
    x, bases, steps = np.zeros(64, np.float32), np.zeros(2, np.float32), np.zeros(2, np.uint16)
    spread, packed = np.zeros(2, np.uint32), np.zeros(32, np.uint8)
    core.pack_groups(x, "float32", bases, steps, spread, packed, 0, 64, 4, 32, 1.0, 0, 0, ())
    for bits, group in ((3, 32), (8, 32), (4, 64), (4, 48), (4, 0)):
        with pytest.raises(ValueError, match="do not match"):
            core.pack_groups(
                x, "float32", bases, steps, spread, packed, 0, 64, bits, group, 1.0, 0, 0, ()
            )
        with pytest.raises(ValueError, match="do not match"):
            core.unpack_groups(bases, steps, packed, x, "float32", 0, 64, bits, group, ())
    with pytest.raises(ValueError, match="float64"):
        core.pack_groups(x, "float64", bases, steps, spread, packed, 0, 64, 4, 32, 1.0, 0, 0, ())
    with pytest.raises(ValueError, match="spread"):
        core.pack_groups(x, "float32", bases, steps, spread[:1], packed, 0, 64, 4, 32, 1.0, 0, 0, ())
