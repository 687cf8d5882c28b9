"""The fused kernels' own code, run on the host: integers bit for bit, floats within a bound."""

import itertools

import numpy as np
import oracle
import pytest
from fused_case import decode, encode, samples
from host import ORDERS, Host, address
from samples import alike, exact_inverse, exact_transform

from sn_compress.errors import CompressError
from sn_compress.ops import launch
from sn_compress.ops.launch import Piece

ml_dtypes = pytest.importorskip("ml_dtypes")

VALUES = ("range", "fp16", "sign", "2bit")


@pytest.mark.parametrize("transform", ["spectrum", "identity"])
@pytest.mark.parametrize("block", [32, 4096])
@pytest.mark.parametrize("values", VALUES)
def test_records_and_residual_equal_the_oracle(block, transform, values):
    pairs = [(0.0, "all"), (0.5, "bitmap"), (0.9, "elias-fano"), (0.98, "bitmap")]
    for theta, positions in [*pairs, (0.0, "elias-fano"), (0.9999, "elias-fano")]:
        form = oracle.make_format(block, transform, theta, values, positions=positions)
        for name, coefs in samples(form).items():
            given = np.zeros_like(coefs)
            if name in ("normal", "ties", "non-finite"):
                given = np.nan_to_num(np.roll(coefs, 1, axis=0), posinf=1, neginf=1)
            words, residual, saturated = oracle.encode(coefs, given, form, 0.9, None)
            done = encode(Host(), form, coefs.reshape(-1), given, decay=0.9)
            np.testing.assert_array_equal(done.words, words, err_msg=f"{form} {name}")
            np.testing.assert_array_equal(done.memory, residual, err_msg=f"{form} {name}")
            assert done.totals[0] == saturated


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_threads_does_not_matter(order):
    kinds = [("fft", None), ("fft", 64), ("dct", None), ("hadamard", None)]
    for (transform, span), values in itertools.product(kinds, ["range", "2bit"]):
        form = oracle.make_format(256, transform, 0.8, values, span=span)
        values_in = np.concatenate([c.reshape(-1)[:256] for c in samples(form).values()])
        memory = np.zeros((len(samples(form)), form.layout.bins * form.layout.parts), np.float32)
        first = encode(Host("up"), form, values_in, memory)
        again = encode(Host(order), form, values_in, memory)
        alike((again.words, again.memory), (first.words, first.memory))
        alike(*(decode(Host(o), form, first.words[None], values_in.size)[0] for o in ("up", order)))


@pytest.mark.parametrize(("bits", "mantissa"), [(4, 0), (4, 3), (8, 7), (12, 5), (16, 9), (16, 15)])
def test_every_width_of_range_float(bits, mantissa):
    form = oracle.make_format(32, "identity", 0.5, "range", bits, mantissa)
    for coefs in samples(form).values():
        words, _, _ = oracle.encode(coefs, None, form, 1.0, None)
        np.testing.assert_array_equal(encode(Host(), form, coefs.reshape(-1)).words, words)


@pytest.mark.parametrize("ranks", [1, 3])
def test_decode_adds_in_rank_order_as_the_oracle_does(ranks):
    for transform, values, positions in itertools.product(
        ["spectrum", "identity"], VALUES, ["elias-fano", "bitmap"]
    ):
        form = oracle.make_format(32, transform, 0.7, values, positions=positions)
        cases = list(samples(form).values())
        for first in range(len(cases)):
            chosen = [cases[(first + r) % len(cases)] for r in range(ranks)]
            records = np.stack([oracle.encode(c, None, form, 1.0, None)[0] for c in chosen])
            expected = np.zeros_like(chosen[0])
            with np.errstate(all="ignore"):
                for rank in records:
                    expected += oracle.decode(rank, form) * np.float32(1 / ranks)
            expected[np.isnan(expected).any(axis=1)] = np.nan
            out, flags, _ = decode(Host(), form, records, expected.size)
            np.testing.assert_array_equal(out.reshape(expected.shape), expected)
            assert flags == 0


# Cooley-Tukey in floating point: |error| <= log2(n) * eta * |x| in the 2-norm, to first order,
# with eta = m + 4 u (sqrt(2) + m), u = 2**-24 and twiddles within m = u (Higham 2002, theorem
# 24.2), hence eta < 7 u. Separating even and odd elements, turning (DCT) and scaling are at most
# one such level each. Fused multiply-adds only round less often.
def bound(block: int) -> float:
    return (np.log2(block) + 3) * 7 * 2.0**-24


@pytest.mark.parametrize(("block", "transform", "span"), [
    *itertools.product([32, 4096], ["fft", "dct", "hadamard"], [None]),
    (64, "dct", None), (128, "hadamard", None), (8192, "fft", None),
    *((block, "fft", span) for block, span in [(64, 32), (4096, 64), (4096, 32), (8192, 1024)]),
])  # fmt: skip
def test_transforms_stay_within_the_bound(block, transform, span):
    form = oracle.make_format(block, transform, 0.99, span=span)
    rng = np.random.default_rng(block)
    values = rng.standard_normal((3, block)).astype(np.float32)
    values[1] = 1  # all in one bin
    values[2] = np.eye(1, block, block // 3)  # spread over all
    done = encode(
        Host(), form, values.reshape(-1), np.zeros((3, form.layout.bins * form.layout.parts), "f4")
    )
    assert done.memory is not None
    sent = oracle.decode(done.words, form).astype(np.float64)
    error = done.memory + sent - exact_transform(form, values.astype(np.float64))
    norm = np.linalg.norm(values, axis=1)
    # One more rounding where the code's value was subtracted. Complex bins count twice.
    assert (np.linalg.norm(error, axis=1) <= (bound(block) + 2.0**-24) * norm).all()

    out, _, _ = decode(Host(), form, done.words[None], values.size)
    expected = exact_inverse(form, sent, block)
    error = out.reshape(values.shape) - expected
    assert (np.linalg.norm(error, axis=1) <= bound(block) * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_come_in_as_their_float32_and_go_out_rounded(dtype):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    form = oracle.make_format(64, "identity", 0.0, "range", 16, 9, positions="all")
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[np.isfinite(every.view(kind).astype(np.float32))].view(kind)
    for values in (every, every[1:1000]):  # whole and aligned; neither
        wide = encode(Host(), form, values.astype(np.float32))
        assert np.array_equal(encode(Host(), form, values).words, wide.words)
    full, _, _ = decode(Host(), form, wide.words[None], 999)
    short, _, _ = decode(Host(), form, wide.words[None], 999, dtype)
    np.testing.assert_array_equal(short.view(np.uint16), full.astype(kind).view(np.uint16))


def test_many_tensors_share_a_launch():
    form = oracle.make_format(32, "identity", 0.8)
    rng = np.random.default_rng(5)
    tensors = [rng.standard_normal(size).astype(np.float32) for size in rng.integers(0, 200, 100)]
    records = [np.zeros((-(-t.size // 32), form.layout.words), np.uint32) for t in tensors]
    totals = np.zeros((100, 2), np.uint64)
    pieces = [
        Piece(address(t), "float32", t.size, len(w), address(w), 8, address(totals[i]))
        for i, (t, w) in enumerate(zip(tensors, records, strict=True))
    ]
    device = Host()
    launch.encode_blocks(device, form, pieces, decay=1.0)
    assert [name for name, _ in device.launches] == ["encode_blocks"] * 3
    for tensor, words in zip(tensors, records, strict=True):
        np.testing.assert_array_equal(words, encode(Host(), form, tensor).words)


def test_damaged_records_raise_flags_and_touch_nothing_else():
    rng = np.random.default_rng(11)
    for transform, positions in itertools.product(["spectrum", "fft"], ["elias-fano", "bitmap"]):
        form = oracle.make_format(256, transform, 0.9, positions=positions)
        sound = oracle.encode(samples(form)["normal"], None, form, 1.0, None)[0]
        for trial in range(50):
            records = sound[None].copy()
            if trial % 2:
                records[0, 1] = rng.integers(0, 2**32, form.layout.words, dtype=np.uint32)
            else:
                word = rng.integers(form.layout.words)
                records[0, 1, word] ^= np.uint32(1 << int(rng.integers(32)))
            size = len(sound) * (form.layout.bins * 2 if transform == "spectrum" else 256)
            out, flags, _ = decode(Host(), form, records, size)
            out = out.reshape(len(sound), -1)
            assert flags in (0, 1)
            # Blocks beside the damaged one are what they were.
            assert np.isfinite(out[[0, 2, 3]]).all()
            if flags:
                assert np.isnan(out[1]).all()
        records[0, 1] = 0xFFFFFFFF
        assert decode(Host(), form, records, size)[1] == 1


def test_sizes_are_64_bits_wide_and_limits_are_named():
    # 2**40 elements: a launch is refused or described, nothing wraps.
    names = ("elements", "first_block", "first_word", "rank_words")
    assert all(launch.SECTION[name] == np.int64 for name in names)
    seen: list[np.ndarray] = []

    class Listener(Host):
        def launch(self, program, kernel, *, blocks, threads, shared_bytes, args):
            seen.append(args[0])

    form = oracle.make_format(4096, "fft", 0.98)
    big = Piece(0, "float32", 2**40, 2**28, 0, 8 + 2**35, 0)
    launch.encode_blocks(Listener(), form, [big, big], decay=1.0)
    assert seen[0]["at"]["elements"][0, 0] == 2**40
    assert seen[0]["at"]["first_block"][0, 1] == 2**28
    assert seen[0]["at"]["first_word"][0, 0] == 8 + 2**35
    with pytest.raises(CompressError, match="larger block"):
        launch.encode_blocks(
            Listener(), form, [Piece(0, "float32", 2**43, 2**31, 0, 8, 0)], decay=1.0
        )
    with pytest.raises(CompressError, match="power of two"):
        launch.encode_blocks(Listener(), oracle.make_format(2**14, "fft", 0.9), [big], decay=1.0)
