"""Kernels over a whole vector, run on the host, against the oracle of the record."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
from fused_case import samples
from host import ORDERS, Host, address

from sn_compress.base.errors import CompressError
from sn_compress.ops.cuda import whole
from sn_compress.ops.cuda.launch import Format


def encode(
    form: Format, coefs: np.ndarray, memory: np.ndarray | None, order: str = "up"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    words, totals = np.full(form.words, 0xDEADBEEF, np.uint32), np.zeros(2, np.uint64)
    scratch = np.full(whole.scratch_bytes(form), 0xFF, np.uint8)
    left, kept = coefs.copy(), None if memory is None else memory.copy()
    vector = whole.Vector(address(left), address(scratch), address(totals), 8, address(kept))
    whole.encode_whole(Host(order), form, vector, address(words), decay=0.9, top=None)
    return words, left if kept is None else kept, totals


def decode(form: Format, records: list[np.ndarray], order: str = "up") -> tuple[np.ndarray, int]:
    coefs = np.zeros(form.bins * form.parts, np.float32)
    scratch = np.full(whole.scratch_bytes(form), 0xFF, np.uint8)
    flags, totals = np.zeros(1, np.uint32), np.zeros(len(records), np.uint64)
    vector = whole.Vector(
        address(coefs), address(scratch), address(totals), 8, flags=address(flags)
    )
    places = [address(words) for words in records]
    whole.decode_whole(Host(order), form, vector, places, weight=1 / len(records))
    for words, total in zip(records, totals, strict=True):
        assert int(total) == oracle.checksum(words)
    return coefs, int(flags[0])


@pytest.mark.parametrize("transform", ["fft", "identity"])
@pytest.mark.parametrize("length", [32, 75, 1000, 20000])
def test_records_equal_the_oracle(length: int, transform: str) -> None:
    for theta, values, positions in itertools.product(
        (0.0, 0.9, 0.9999), ("range", "fp16"), ("elias-fano", "bitmap", "all")
    ):
        if positions == "all" and theta:
            continue
        form = oracle.make_format(length, transform, theta, values, positions=positions)
        for name, coefs in samples(form, 1).items():
            memory = np.zeros_like(coefs) if name == "non-finite" else np.roll(coefs, 7, axis=1)
            words, residual, _ = oracle.encode(coefs, memory, form, 0.9, None)
            got, left, totals = encode(form, coefs[0], memory[0])
            np.testing.assert_array_equal(got, words[0], err_msg=f"{form} {name}")
            np.testing.assert_array_equal(left, residual[0], err_msg=f"{form} {name}")
            assert int(totals[1]) == oracle.checksum(words[0])


@pytest.mark.parametrize("order", ORDERS)
def test_three_ranks_add_up_in_any_order_of_threads(order: str) -> None:
    for positions in ("elias-fano", "bitmap"):
        form = oracle.make_format(20000, "fft", 0.95, positions=positions)
        cases = [samples(form, 1)[name] for name in ("normal", "ties", "sparse")]
        records = [oracle.encode(c, None, form, 1.0, None)[0][0] for c in cases]
        expected = np.zeros(form.bins * 2, np.float32)
        for words in records:
            expected += oracle.decode(words[None], form)[0] * np.float32(1 / 3)
        got, flags = decode(form, records, order)
        np.testing.assert_array_equal(got, expected)
        assert flags == 0
        for coefs in cases:
            assert np.array_equal(encode(form, coefs[0], None, order)[0],
                                  oracle.encode(coefs, None, form, 1.0, None)[0][0])  # fmt: skip


def test_ties_over_many_chunks() -> None:
    # More chunks than one round of the scan of offsets takes.
    form = oracle.make_format(4_300_000, "identity", 0.5)
    coefs = np.random.default_rng(1).integers(0, 3, form.bins).astype(np.float32)
    words, _, _ = oracle.encode(coefs[None], None, form, 1.0, None)
    got, _, _ = encode(form, coefs, None)
    np.testing.assert_array_equal(got, words[0])
    np.testing.assert_array_equal(decode(form, [got])[0], oracle.decode(words, form)[0])


def test_non_finite_and_damaged_records_become_nan() -> None:
    rng = np.random.default_rng(3)
    for positions in ("elias-fano", "bitmap"):
        form = oracle.make_format(9000, "fft", 0.9, positions=positions)
        cases = samples(form, 1)
        marked = oracle.encode(cases["non-finite"], None, form, 1.0, None)[0][0]
        sound = oracle.encode(cases["normal"], None, form, 1.0, None)[0][0]
        coefs, flags = decode(form, [sound, marked])
        assert np.isnan(coefs).all()
        assert flags == 0
        for trial in range(20):
            broken = sound.copy()
            broken[rng.integers(form.words)] ^= np.uint32(1 << int(rng.integers(32)))
            if trial % 2:
                broken = rng.integers(0, 2**32, form.words, dtype=np.uint32)
            coefs, flags = decode(form, [broken, sound])
            assert flags in (0, 1)
            assert not flags or np.isnan(coefs).all()


def test_what_does_not_fit_is_refused() -> None:
    nowhere = whole.Vector(0, 0, 0, 8)
    form = oracle.make_format(64, "fft", 0.5, "sign")
    with pytest.raises(CompressError, match="sign"):
        whole.encode_whole(Host(), form, nowhere, 0, decay=1.0, top=None)
    huge = Format(2**33, 2**33, "fft", "range", 1, 1, 8, 3, "bitmap")
    with pytest.raises(CompressError, match=r"2\*\*32"):
        whole.encode_whole(Host(), huge, nowhere, 0, decay=1.0, top=None)
