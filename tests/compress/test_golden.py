"""Payloads made long ago, kept in tests/golden/, still decode to the same bits of coefficients."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
from samples import exact_inverse, transform_error

from sn_compress import FFTCodec, Payload
from sn_compress.codecs.registry import CODECS
from sn_compress.ops.record import encode_records

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ALL = json.loads((GOLDEN / "payloads.json").read_text("utf-8"))
METHODS = {name: entry for name, entry in ALL.items() if "codec" in entry}
ENTRIES = {name: entry for name, entry in ALL.items() if "codec" not in entry}  # of FFTCodec


@pytest.fixture(scope="module")
def make():
    """tests/golden/make.py as a module."""
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_version_2_differs_from_version_1_in_the_checksum_alone():
    ones = [name for name in ENTRIES if name.startswith("v1")]
    assert len(ones) == 16
    for name in ones:
        if "fft" not in FFTCodec(**ENTRIES[name]["settings"]).transform:  # the same on all machines
            old, new = ((GOLDEN / f"{v}{name[2:]}.bin").read_bytes() for v in ("v1", "v2"))
            assert old[:2] + old[3:28] + old[32:] == new[:2] + new[3:28] + new[32:]


def opened(name: str) -> tuple[FFTCodec, Payload]:
    data = (GOLDEN / f"{name}.bin").read_bytes()
    return FFTCodec(**ENTRIES[name]["settings"]), Payload.from_bytes(data)


def test_nothing_is_missing_or_large(make):
    files = {path.stem: path.read_bytes() for path in GOLDEN.glob("*.bin")}
    assert files.keys() == ALL.keys() == {case[0] for case in make.CASES + make.METHODS}
    assert {entry["codec"] for entry in METHODS.values()} | set(make.TRANSFORMS) == set(CODECS)
    for name, data in files.items():
        assert len(data) < 2048, name
        assert data[2] == int(name[1]), f"{name} says its version"


@pytest.mark.parametrize("name", ENTRIES)
def test_it_decodes_and_its_coefficients_are_written_in_the_same_bits(backend, make, name):
    codec, payload = opened(name)
    entry, words = ENTRIES[name], payload.body.view("<u4")
    assert (payload.n, payload.saturated) == (entry["n"], entry["saturated"])
    coefficients = make.coefficients(codec, payload)
    assert make.digest(coefficients) == entry["coefficients_sha256"]
    y = codec.decode(payload)
    if codec.transform == "axes":  # back to what the records hold
        y = scipy.fft.dctn(y.reshape(codec.shape), axes=codec.axes, norm="ortho").reshape(-1)
    for s, part in zip(codec.sections(payload.n), coefficients, strict=True):
        rows = np.full((s.count, s.layout.words), 0xFFFFFFFF, np.uint32)
        top = 0x3F80 if codec.window == 1.0 else None
        assert encode_records(part.copy(), None, rows, s.layout, top=top).error == 0
        end = s.words_at + rows.size
        np.testing.assert_array_equal(rows.reshape(-1), words[s.words_at : end])
        b = s.layout.block
        exact = exact_inverse(codec, part.astype(np.float64), b)
        got = np.pad(y[s.start : s.stop], (0, s.count * b - (s.stop - s.start))).reshape(-1, b)
        for block, (want, have) in enumerate(zip(exact, got, strict=True)):
            here = slice(0, min(b, s.stop - s.start - block * b))
            if np.isnan(part[block]).any():
                assert np.isnan(have[here]).all()
            else:
                # One way; over axes there and back, and of all that was sent.
                slack = transform_error(codec, payload.n) * np.linalg.norm(want)
                if codec.transform == "axes":
                    slack = 2.1 * transform_error(codec, payload.n) * np.linalg.norm(y)
                assert np.linalg.norm(have[here] - want[here]) <= slack


@pytest.mark.parametrize("name", ENTRIES)
def test_it_stands_for_the_vector_it_was_made_of(make, name):
    codec, payload = opened(name)
    x = make.vector(payload.n, {int(k): float(v) for k, v in ENTRIES[name]["non_finite"].items()})
    again, decoded = codec.encode(x), codec.decode(payload)
    # FFT libraries differ in the last bits and may thus choose otherwise, but not do much worse.
    difference = (decoded.astype(np.float64) - x)[np.isfinite(decoded)]
    e, whole = transform_error(codec, payload.n), math.sqrt(again.energy)
    assert np.linalg.norm(difference) <= math.sqrt(again.error) + 4 * e * whole + 2.0**-11 * whole
    assert again.to_bytes()[3:24] == payload.to_bytes()[3:24]  # byte 2 is the version
    assert again.nbytes == payload.nbytes


@pytest.mark.parametrize("name", METHODS)
def test_a_payload_of_each_method_decodes_and_stands_for_its_vector(backend, make, name):
    entry = METHODS[name]
    codec = make.method(entry["codec"], entry["settings"])
    payload = Payload.from_bytes((GOLDEN / f"{name}.bin").read_bytes())
    assert (payload.n, payload.saturated) == (entry["n"], entry["saturated"])
    decoded = codec.decode(payload)
    assert make.digest([decoded]) == entry["decoded_sha256"]
    x = make.vector(payload.n, {})
    again = codec.encode(x)
    if entry["settings"].get("form") != "paper":  # whose size zlib decides
        assert again.nbytes == payload.nbytes
    assert again.to_bytes()[3:24] == payload.to_bytes()[3:24]  # byte 2 is the version
    lost = float(np.square(decoded.astype(np.float64) - x).sum())
    # Statistics are summed in other orders elsewhere, which may turn a code or a choice.
    assert lost <= 1.001 * again.error + 1e-6 * again.energy


def test_make_overwrites_nothing(make, capsys):
    before = {path: path.read_bytes() for path in GOLDEN.iterdir() if path.is_file()}
    make.main()
    assert {path: path.read_bytes() for path in GOLDEN.iterdir() if path.is_file()} == before
    assert capsys.readouterr().out.count("is there, left alone") == len(ALL)
