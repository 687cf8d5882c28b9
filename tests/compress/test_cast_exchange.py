"""CastCompression: what arrives, what is remembered and how many bytes, without a framework."""

import engines
import numpy as np
import pytest
import torch

from sn_compress import CastCompression
from sn_compress.ops.casts import Cast

SHAPES = {"wide": (60, 50), "small": (33, 7), "kernel": (16, 8, 3, 3)}
ELEMENTS = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
ON = {"numpy": np.asarray, "torch": torch.from_numpy}


def engines_of(ranks, dtype):
    return engines.engines(CastCompression.using(dtype=dtype, min_elements=1), ranks)


def noise(ranks, seed):
    return engines.noise(seed, ranks, SHAPES)


def step(every, values, like=np.asarray, kind="f4"):
    """The means of all ranks, which are alike, and the bytes that each rank received."""
    mine = [{name: own[name].astype(kind) for name in SHAPES} for own in values]
    travelled = engines.step(every, mine, SHAPES, make=like)
    assert travelled.kinds == ["alltoall", "gather"]
    found = {name: mine[0][name].astype(np.float32) for name in SHAPES}
    return found, travelled.received


def rounded(vector, dtype):
    cast = Cast(dtype)
    padded = np.pad(vector, (0, cast.padded(vector.size) - vector.size))
    return np.asarray(cast.decode(cast.encode(padded))[: vector.size], np.float32)


@pytest.mark.parametrize(("ranks", "dtype", "like"), [
    (1, "fp8", "numpy"), (2, "bf16", "torch"), (2, "fp8", "numpy"), (3, "fp16", "numpy"),
    (3, "fp8", "torch"), (4, "fp16", "torch"), (4, "bf16", "numpy"),
])  # fmt: skip
def test_a_mean_is_that_of_rounded_gradients_rounded_once(ranks, dtype, like):
    values = noise(ranks, 0)
    found, received = step(engines_of(ranks, dtype), values, ON[like])
    for name in SHAPES:
        total = np.zeros(ELEMENTS[name], np.float32)
        for own in values:
            total += rounded(own[name], dtype)
        expected = rounded(total / np.float32(ranks), dtype)
        assert np.array_equal(found[name], expected), name
    # Of an element that is this rank's r - 1 parts come; of the others a mean each.
    block = Cast(dtype).block
    blocks = sum(-(-n // block) for n in ELEMENTS.values())
    shares = [blocks * (r + 1) // ranks - blocks * r // ranks for r in range(ranks)]
    size = 257 if dtype == "fp8" else 2
    assert received == [((ranks - 1) * own + blocks - own) * size for own in shares]


def test_a_report_counts_half_and_a_quarter_of_the_bytes():
    for dtype, ratio in (("bf16", 2), ("fp8", 4 * sum(ELEMENTS.values()) / (257 * (12 + 1 + 5)))):
        every = engines_of(3, dtype)
        step(every, noise(3, 0))
        report = every[1].report()
        assert report["cast"] == len(SHAPES)
        assert report["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
def test_nan_and_inf_of_one_rank_reach_all_and_are_not_remembered(dtype):
    every = engines_of(3, dtype)
    step(every, noise(3, 0))
    before = every[1].residual("wide").copy() if dtype == "fp8" else None
    values = noise(3, 1)
    values[1]["wide"][[5, 700]] = np.nan, np.inf
    found, _ = step(every, values)
    assert not np.isfinite(found["wide"][[5, 700]]).any()
    assert np.isfinite(found["kernel"]).all()
    if dtype != "fp8":
        assert np.isinf(found["wide"][700])
        return
    after = every[1].residual("wide")
    assert np.isfinite(after).all()
    assert np.array_equal(after[:256], before[:256])


def test_half_precision_gradients_are_summed_in_float32():
    values = [{name: np.ones(n, np.float32) for name, n in ELEMENTS.items()} for _ in range(4)]
    for own in values[1:]:
        own["wide"][:] = 2.0**-11  # of 1 half a step in fp16
    found, _ = step(engines_of(4, "fp16"), values, kind="f2")
    # A sum of fp16 numbers one by one would stay at 1.
    assert (found["wide"] == np.float16((1 + 3 * 2.0**-11) / 4)).all()
