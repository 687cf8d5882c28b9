"""Activations packed where they are: array code, Triton's kernels and the host's form agree."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sn_compress.ops import groups
from sn_memory.torch.activations import packing

SIZES = (0, 1, 31, 32, 33, 63, 1000, 2**20 + 1)
KEY = (0x12345678, 0x9ABCDEF0)
TRITON = Path(sys.prefix, "triton")


def vectors(n: int) -> dict[str, torch.Tensor]:
    """Values of each kind; all but the last three are finite in float16 as well."""
    chance = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=chance)
    holes = x * (torch.rand(n, generator=chance) > 0.3)
    lost = x.clone()
    lost[: n // 3 : 7], lost[1 : n // 2 : 31], lost[5::97] = math.nan, -math.inf, 3e38
    at = torch.arange(n)
    return {
        "normal": x,
        "half zeros": x.relu(),
        "negative": -x.relu(),
        "holes": holes,
        "far from zero": x + 1000,
        "denormal": (at % 7 - 3).float() * 2.0**-149,
        "all equal": torch.full((n,), 0.3),
        "zeros": torch.zeros(n),
        "wide": x * 10.0 ** (at % 60 - 30),
        "lost": lost,
        "all NaN": torch.full((n,), math.nan),
    }


def runs_of(n: int) -> list[int]:
    """Lengths of runs that n elements fall into: 0, which is all, one element, some between."""
    return [0, *(run for run in (1, 9, 100, 500) if 0 < n < 2000 and n % run == 0)]


def expected(x: torch.Tensor, bits: int, run: int = 0) -> tuple[groups.Grids, torch.Tensor]:
    """What the host makes of values that all fit, and what comes back."""
    n, wide = x.numel(), x.float().numpy()
    kept = groups.pack(wide, bits, packing.GROUP, math.inf, KEY, run=run)
    back = groups.unpack(kept.bases, kept.steps, kept.codes, n, bits, packing.GROUP, run=run)
    return kept, torch.from_numpy(np.asarray(back)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
def test_array_code_has_the_bits_of_the_host(n, dtype):
    for bits in (2, 4, 8):
        for name, x in list(vectors(n).items())[:-3]:
            values = x.to(dtype)
            for run in runs_of(n):
                made, case = packing.pack(values, bits, KEY, run), (name, bits, run)
                kept, back = expected(values, bits, run)
                assert np.array_equal(made.bases.numpy(), kept.bases), case
                assert np.array_equal(made.steps.view(torch.uint16).numpy(), kept.steps), case
                assert np.array_equal(made.codes.numpy(), kept.codes), case
                assert torch.equal(packing.unpack(made, n, bits, dtype, run), back), case
                # The host counts the way between two points in 256 parts.
                ours, theirs = float(made.variance(n)), kept.variance(n)
                coarse = float(made.steps.max() if n else 0) ** 2 / 256
                assert math.isclose(ours, theirs, rel_tol=0.02, abs_tol=coarse), case
        if n > 2000:
            break


def test_a_group_that_is_not_finite_is_nan_and_no_other():
    x = torch.randn(5 * packing.GROUP)
    x[300], x[1030] = math.inf, math.nan
    for bits in groups.WIDTHS:
        back = packing.unpack(packing.pack(x, bits, KEY), x.numel(), bits, torch.float32)
        rows = back.isnan().view(5, -1)
        assert rows.all(1).tolist() == [False, True, False, False, True]
        assert rows.any(1).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize("bits", groups.WIDTHS)
def test_rounding_is_unbiased_and_its_variance_is_told(bits):
    x = torch.randn(4 * packing.GROUP, generator=torch.Generator().manual_seed(0))
    x[::3] = 0
    total, squares, rounds = torch.zeros_like(x), torch.zeros_like(x), 400
    for number in range(rounds):
        made = packing.pack(x, bits, groups.keys(0, number))
        error = packing.unpack(made, x.numel(), bits, torch.float32) - x
        total += error
        squares += error.square()
    told = float(made.variance(x.numel()))
    assert math.isclose(float(squares.mean()) / rounds, told, rel_tol=0.1)
    step = made.steps.float().repeat_interleave(packing.GROUP)
    way = ((x - made.bases.repeat_interleave(packing.GROUP)) / step).frac()
    # Sums of errors are normal where both ends are drawn often; of a thousand none is six off.
    often = (way > 0.03) & (way < 0.97)
    deviation = step * (way * (1 - way) * rounds).sqrt()
    assert often.any()
    assert float((total.abs() / deviation)[often].max()) < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_come_back(dtype):
    for n in SIZES[:-1]:
        values = torch.randn(n).to(dtype)
        values[::3] = 0
        values[1::7] = math.nan
        values[2::7] = -0.0
        for test, met in packing.TESTS.items():
            mask = met(values)
            packed = packing.pack_mask(values, test)
            # On the host C++ packs; on a device, these codes are the bits.
            assert torch.equal(packing.pack_codes(mask.view(torch.uint8), 1), packed)
            assert torch.equal(packing.unpack_codes(packed, n, 1).bool(), mask)
            for given in (2.0, torch.full((n,), math.nan, dtype=dtype)):
                spread = torch.empty(n, dtype=dtype)
                packing.spread_mask(packed, given, spread)
                wanted = torch.where(mask, torch.as_tensor(given, dtype=dtype), 0)
                assert torch.equal(spread.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize(("values", "other"), [
    ([0.0, 2.5, 0.0], 2.5), ([2.5], 2.5), ([0.0], 0.0), ([1.0, 2.0], None), ([0.0, math.nan], None),
])  # fmt: skip
def test_two_values(values, other):
    assert packing.two_values(torch.tensor(values)) == other


@pytest.mark.slow
@pytest.mark.skipif(not TRITON.exists(), reason="Triton is not installed: make setup")
def test_kernels_in_the_interpreter_have_the_bits_of_array_code():
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("compared")


def cases() -> Iterator[tuple[int, str, torch.dtype, int, int]]:
    """Sizes, values, types, bits and runs; each pair of them, as the interpreter is slow."""
    halves = (torch.float16, torch.bfloat16)
    for place, (n, name) in enumerate(itertools.product(SIZES[:-1], vectors(0))):
        yield n, name, torch.float32, groups.WIDTHS[place % 4], 0
        yield n, name, halves[place % 2], 4, 0
    for n in SIZES[:-1]:
        for place, run in enumerate(runs_of(n)[1:]):
            yield n, "holes", (torch.float32, *halves)[place % 3], groups.WIDTHS[place % 3], run
    # Many programs.
    yield SIZES[-1], "lost", torch.float32, 2, 0
    yield SIZES[-1], "holes", torch.bfloat16, 8, 0


def compare_kernels() -> None:
    """Compare the kernels with array code on every kind of values."""
    sys.path.append(str(TRITON))
    from sn_memory.torch.activations import kernels

    for case in cases():
        n, name, dtype, bits, run = case
        values = vectors(n)[name].to(dtype)
        made = packing.pack(values, bits, KEY, run)
        out = [torch.empty_like(part) for part in vars(made).values()]
        kernels.pack(values, bits, KEY, run or n, *out)
        for part, own in zip(vars(made), out, strict=True):
            theirs = getattr(made, part).float().nan_to_num(7)
            if part == "spread":  # a sum in another order
                torch.testing.assert_close(own.nan_to_num(7), theirs, rtol=1e-4, atol=1e-3)
            else:
                assert torch.equal(own.float().nan_to_num(7), theirs), case
        back = torch.empty(n, dtype=dtype)
        kernels.unpack(made.bases, made.steps, made.codes, bits, run or n, back)
        theirs = packing.unpack(made, n, bits, dtype, run)
        if dtype == torch.bfloat16:
            # The interpreter cuts bfloat16 off where a GPU rounds: one unit at most.
            apart = (back.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
            assert bool((apart[~theirs.isnan()] <= 1).all()), case
        else:
            assert torch.equal(back.nan_to_num(7), theirs.nan_to_num(7)), case
    print("compared")


if __name__ == "__main__":
    compare_kernels()
