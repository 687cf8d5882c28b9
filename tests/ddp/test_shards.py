"""Shards of FSDP2 in few bits: bytes, errors, what is not finite, and rounding by chance."""

from __future__ import annotations

import pytest
import torch

from sn_compress.torch.fsdp_shards import BlockCodec, FloatCodec


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 255, 256, 257, 1000])
def test_bytes_and_errors_of_blocks(bits, n):
    codec = BlockCodec(bits)
    rows = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    words = codec.encode(rows)
    assert words.shape == (3, codec.nbytes(n))
    assert words.dtype == torch.uint8
    back = codec.decode(words, n)
    assert back.shape == rows.shape
    step = rows.abs().max() / (7 if bits == 4 else 127)
    assert (back - rows).abs().max() <= 0.5001 * step


@pytest.mark.parametrize("bits", [4, 8])
def test_largest_values_come_back_exactly(bits):
    rows = torch.zeros(1, 512)
    rows[0, 3], rows[0, 400] = -2.5, 1e30
    assert torch.equal(BlockCodec(bits).decode(BlockCodec(bits).encode(rows), 512), rows)


@pytest.mark.parametrize(("codec", "along"), [
    (BlockCodec(4), 64), (BlockCodec(8), 256), (FloatCodec("bf16"), 1), (FloatCodec("fp8"), 256),
])  # fmt: skip
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_takes_its_block_along_and_no_other(codec, along, bad):
    rows = torch.ones(2, 1024)
    rows[1, 300] = bad
    back = codec.decode(codec.encode(rows, torch.Generator().manual_seed(0)), 1024)
    lost = ~back.isfinite()
    assert lost[1, 300]
    assert lost.sum() == along


def test_denormal_blocks_are_zeros_or_themselves():
    rows = torch.full((1, 64), 1e-44)
    back = BlockCodec(4).decode(BlockCodec(4).encode(rows), 64)
    assert back.isfinite().all()
    assert (back - rows).abs().max() <= 1e-38


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_rounding_is_unbiased(dtype):
    rows = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    codec, generator = BlockCodec(4), torch.Generator().manual_seed(0)
    every = [codec.decode(codec.encode(rows, generator), 256) for _ in range(2000)]
    error = torch.stack(every).mean(0) - rows.float()
    # One is off by at most a step of a seventh of the block's peak: of 2,000 the mean by a 45th.
    step = rows.float().view(-1, 64).abs().amax(1) / 7
    assert (error.view(-1, 64).abs().amax(1) <= 5 * step / 2000**0.5).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_random_rounding_of_floats_is_unbiased(dtype, kind):
    rows = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)).to(kind)
    codec, generator = FloatCodec(dtype), torch.Generator().manual_seed(0)
    every = [codec.decode(codec.encode(rows, generator), 300) for _ in range(1000)]
    words = codec.encode(rows, generator)
    assert words.shape == (2, codec.nbytes(300)) == (2, 600 if dtype == "bf16" else 2 * 257)
    # Each is off by less than a step of its own exponent, the mean of 1,000 by a 31st of that; and
    # in fp8 numbers below a 2**15th of the largest, of which there are none here, by more.
    step = rows.float().abs() * (2**-7 if dtype == "bf16" else 2**-3)
    assert ((every[0] - rows.float()).abs() <= step).all()
    assert ((torch.stack(every).mean(0) - rows.float()).abs() <= 5 * step / 1000**0.5).all()
    assert (dtype, kind) == ("bf16", torch.bfloat16) or not torch.equal(every[0], every[1])
