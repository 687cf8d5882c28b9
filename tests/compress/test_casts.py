"""Floats of 16 and 8 bits: NumPy's bits are torch's, and blocks keep what they promise."""

import numpy as np
import pytest
import torch

from sn_compress.ops.casts import DTYPES, Cast, to_fp8

EVERY_BF16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def test_fp8_of_every_bf16_and_of_ties_is_torchs():
    inside = EVERY_BF16[~(np.abs(EVERY_BF16) > 448)]  # the others a scale brings down
    assert np.isnan(inside).sum() == 2 * 127
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.unique(every[np.isfinite(every)])
    ties = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.concatenate([inside, ties, *beside, finite]).astype(np.float32)
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8)
    with np.errstate(all="ignore"):
        assert np.array_equal(to_fp8(x), expected.numpy())


def samples(n):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(n) * 2.0 ** rng.integers(-140, 120, n)).astype(np.float32)
    x[:1000] = rng.standard_normal(1000)
    x[1024:1280] = 0
    x[[3, 700, 701]] = np.nan, np.inf, -np.inf
    # Halfway between two of bfloat16, and one beside that.
    halfway = x.view(np.uint32)[2048:5120]
    halfway[:] = (halfway & 0xFFFF0000 | 0x8000) + np.repeat(np.uint32([0, 1, -1 % 2**32]), 1024)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_and_torch_make_and_read_the_same_bytes(dtype):
    cast, x = Cast(dtype), samples(256 * 40)
    words = cast.encode(x.copy())
    in_torch = cast.encode(torch.from_numpy(x.copy()))
    assert words.dtype == np.uint8
    assert words.size == cast.nbytes(x.size)
    values = np.asarray(cast.decode(words), np.float32)
    assert np.array_equal(values, cast.decode(in_torch).float().numpy(), equal_nan=True)
    if dtype == "fp8":  # of other types the bits of NaN are the library's
        assert np.array_equal(words, in_torch.numpy())
    room = cast.room(x.size, torch.zeros(1))
    room.copy_(torch.from_numpy(x))
    again = cast.decode(cast.encode(room)).float().numpy()
    assert np.array_equal(again, values, equal_nan=True)


def test_a_value_of_fp8_is_off_by_a_sixteenth_at_most_whatever_its_block_holds():
    cast, x = Cast("fp8"), samples(256 * 40)
    x[~np.isfinite(x)] = 0
    got = cast.decode(cast.encode(x.copy())).astype(np.float64)
    largest = np.repeat(np.abs(x.reshape(-1, 256)).max(1), 256).astype(np.float64)
    # Below 2**-15 of the largest lie subnormals, 2**-9 apart where the largest is at 224 or more;
    # and no scale is below 2**-117.
    bound = np.maximum(np.abs(x) / 16.0, np.maximum(largest / 224, 2.0**-117) * 2.0**-10)
    assert (np.abs(got - x) <= bound).all()
    assert (got[1024:1280] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_block_of_fp8_with_nan_or_inf_is_nan(bad):
    x = np.linspace(-3, 3, 768, dtype=np.float32)
    x[300] = bad
    for like in (x, torch.from_numpy(x)):
        got = np.asarray(Cast("fp8").decode(Cast("fp8").encode(like)))
        assert np.isnan(got[256:512]).all()
        assert np.isfinite(np.delete(got, slice(256, 512))).all()


def test_powers_of_two_survive_at_any_scale():
    for power in (-149, -127, -126, -100, 0, 127):
        x = np.full(256, 2.0**power, np.float32)
        # 2**-126 is the least that is not zero.
        expected = x if power >= -126 else 0 * x
        assert np.array_equal(Cast("fp8").decode(Cast("fp8").encode(x.copy())), expected)
