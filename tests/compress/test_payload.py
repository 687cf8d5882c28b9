"""The bytes: header, checksum, what is refused, and docs/format.md held to its word."""

import math
import re
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from fuzz import reseal
from samples import codecs, fft_error, for_each, random, transform_error

from sn_compress import FFTCodec, Payload, PayloadError
from sn_compress.codecs.base import MAX_ELEMENTS, mean_of_gathered
from sn_compress.ops.record import decode_records

FORMAT = Path(__file__).resolve().parents[2] / "docs" / "format.md"


def resealed(data: bytes, at: int, new: bytes) -> bytes:
    """`data` with bytes replaced and the checksum made right again."""
    changed = bytearray(data)
    changed[at : at + len(new)] = new
    return reseal(changed)


@for_each("n", (0, 33, 4097))
@pytest.mark.parametrize("codec", codecs(), ids=str)
def test_to_bytes_and_back(codec, n):
    payload = codec.encode(random(n))
    data = payload.to_bytes()
    assert len(data) == payload.nbytes == codec.payload_bytes(n)
    # A peer's buffer may start at any address; words are read from it all the same.
    shifted = [memoryview(bytes(shift) + data)[shift:] for shift in (1, 2, 3)]
    for form in (data, bytearray(data), np.frombuffer(data, np.uint8), *shifted):
        again = Payload.from_bytes(form)
        assert again.to_bytes() == data
        assert (again.codec_id, again.n, again.settings, again.saturated) == (
            payload.codec_id, payload.n, payload.settings, payload.saturated,
        )  # fmt: skip
        assert (again.energy, again.error) == (None, None)
        np.testing.assert_array_equal(codec.decode(again), codec.decode(payload))


def test_header_is_as_documented():
    codec = FFTCodec(theta=0.75, block=64, bits=5, mantissa=2, positions="bitmap")
    data = codec.encode(random(100)).to_bytes()
    assert data[:4] == b"SN\x02\x01"
    assert struct.unpack("<Q", data[4:12]) == (100,)
    assert data[12:24] == struct.pack("<IBBBBI", 3 << 30, 6, 5, 2, 0x01, 0)
    assert data[24:28] == bytes(4)
    # 0.6 of 2**32 is 2576980377.6: rounded down.
    assert FFTCodec(theta=0.6).encode(random(9)).settings[:4] == struct.pack("<I", 2_576_980_377)
    half = FFTCodec(theta=0.0, block=None, values="fp16").encode(random(100)).to_bytes()
    assert half[12:24] == struct.pack("<IBBBBI", 0, 0, 0, 0, 0x02, 0)
    # Positions in bit 0, values in 1 to 3, transform in 4 to 7.
    coders = {
        ("range", "fft"): 0x00, ("sign", "dct"): 0x14, ("2bit", "hadamard"): 0x26,
        ("fp16", "identity"): 0x32,
    }  # fmt: skip
    for (values, transform), byte in coders.items():
        assert FFTCodec(values=values, transform=transform).settings[7] == byte
    axes = FFTCodec(transform="axes", shape=(8, 4, 3, 3), axes=(2, 3))
    assert axes.settings[7:] == bytes([0x40]) + struct.pack(
        "<I", zlib.crc32(b"((8, 4, 3, 3), (2, 3))")
    )


@pytest.mark.parametrize("codec", codecs(), ids=str)
def test_every_truncation_is_refused(codec):
    data = codec.encode(random(70)).to_bytes()
    for size in range(len(data)):
        with pytest.raises(PayloadError):
            codec.decode(Payload.from_bytes(data[:size]))
    for size in range(0, len(data), 16):  # even if the checksum is made to fit
        with pytest.raises(PayloadError):
            codec.decode(Payload.from_bytes(resealed(data[:size], 0, b"")))


def test_every_change_of_one_byte_is_refused():
    data = FFTCodec(theta=0.9).encode(random(70)).to_bytes()
    for at in range(len(data)):
        for change in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= change
            with pytest.raises(PayloadError, match="corrupt in transit" if at >= 32 else None):
                Payload.from_bytes(damaged)


def test_version_1_is_read_by_its_own_sum():
    made = FFTCodec(theta=0.5, block=64)
    words = np.frombuffer(made.encode(random(4000)).to_bytes(), "<u4")
    old = words.copy()
    old[0] = int(old[0]) & 0xFF00FFFF | 1 << 16
    old[7] = 0
    old[7] = sum((2 * i + 1) * int(w) for i, w in enumerate(old)) % 2**32
    payload = Payload.from_bytes(old.view(np.uint8))
    new = made.decode(Payload.from_bytes(words.view(np.uint8)))
    np.testing.assert_array_equal(made.decode(payload), new)
    assert payload.to_bytes() == old.tobytes()
    # A version changed on the way is no way around the checksum.
    for at, version in ((words, 1), (old, 2)):
        changed = at.copy()
        changed[0] = int(changed[0]) & 0xFF00FFFF | version << 16
        with pytest.raises(PayloadError, match="checksum"):
            Payload.from_bytes(changed.view(np.uint8))


@pytest.mark.parametrize(("at", "new", "message"), [
    (0, b"PK", r"magic b'PK', version 2; expected b'SN', 1 to 3"),
    (2, b"\x04", "version 4.*Use one version on all ranks"),
    (2, b"\x00", "version 0"),
    (4, struct.pack("<Q", MAX_ELEMENTS + 1), "claims 281474976710657 elements"),
    (4, struct.pack("<Q", 2**64 - 1), "claims"),
])  # fmt: skip
def test_what_the_header_must_say(at, new, message):
    data = FFTCodec().encode(random(70)).to_bytes()
    with pytest.raises(PayloadError, match=message):
        Payload.from_bytes(resealed(data, at, new))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_what_is_too_short_or_not_in_sixteens(size):
    with pytest.raises(PayloadError, match=f"{size} bytes are not a payload: expected 32 or more"):
        Payload.from_bytes(bytes(size))


def test_every_byte_of_the_settings_is_compared():
    codec = FFTCodec()
    data = codec.encode(random(70)).to_bytes()
    for at in range(12, 24):
        for change in (1, 0x10, 0x80):
            forged = Payload.from_bytes(resealed(data, at, bytes([data[at] ^ change])))
            with pytest.raises(PayloadError, match="Decode with the settings it was encoded with"):
                codec.decode(forged)


def test_payloads_over_other_axes_are_refused():
    codec = FFTCodec(transform="axes", shape=(10, 3, 3), axes=(1, 2))
    for other in ({"axes": (2,)}, {"shape": (10, 9, 1)}, {"shape": (3, 10, 3)}):
        foreign = FFTCodec(**{"transform": "axes", "shape": (10, 3, 3), "axes": (1, 2)} | other)
        with pytest.raises(PayloadError, match="Decode with the settings"):
            codec.decode(foreign.encode(random(90)))
    data = resealed(codec.encode(random(90)).to_bytes(), 4, struct.pack("<Q", 91))
    with pytest.raises(PayloadError, match="91 elements"):
        codec.decode(Payload.from_bytes(data))


def test_gathered_payloads():
    codec = FFTCodec(theta=0.9)
    parts = [codec.encode(random(500, seed)) for seed in range(3)]
    joined = np.concatenate([part.buffer for part in parts])
    np.testing.assert_array_equal(mean_of_gathered(codec, joined, 3, 500), codec.decode_mean(parts))
    with pytest.raises(PayloadError, match=f"expected {codec.payload_bytes(500)} from each"):
        mean_of_gathered(codec, joined[:-16], 3, 500)
    other = np.frombuffer(resealed(parts[1].to_bytes(), 4, struct.pack("<Q", 499)), np.uint8)
    joined[other.size : 2 * other.size] = other
    with pytest.raises(PayloadError, match="rank 1: header claims 499 elements; expected 500"):
        mean_of_gathered(codec, joined, 3, 500)


def documented() -> dict[str, object]:
    """The names that the code of docs/format.md defines, its example run on its own bytes."""
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", FORMAT.read_text("utf-8"), re.DOTALL):
        exec(compile(code, str(FORMAT), "exec"), names)  # asserts included
    return names


def test_the_documented_example():
    names = documented()
    codec = FFTCodec(theta=0.75, block=32, bits=4, mantissa=1)
    vector = np.array(names["vector"], np.float32)
    assert codec.encode(vector).to_bytes() == names["payload"]
    # Its spectrum is representable, so only the transforms err; 32 elements, norm |x|.
    error = codec.decode(Payload.from_bytes(names["payload"])) - vector
    assert np.linalg.norm(error) <= 3 * fft_error(32) * np.linalg.norm(vector)


@for_each("n", (0, 33, 300))
@pytest.mark.parametrize("codec", [*codecs(), *codecs(theta=0.99)[::3]], ids=str)
def test_the_documented_decoder_reads_every_kind_of_payload(codec, n):
    names = documented()
    x = random(n)
    if n == 300:
        x[70] = np.inf
    payload = codec.encode(x)
    blocks = list(names["read"](payload.to_bytes()))
    assert sum(elements for _, elements, _ in blocks) == n
    ours = []
    for s in codec.sections(n):
        words = payload.body.view("<u4")[s.words_at : s.words_at + s.count * s.layout.words]
        accum = np.zeros((s.count, s.layout.bins * s.layout.parts), np.float32)
        decode_records(words.reshape(s.count, -1), accum, s.layout, 1.0)
        ours += [(row, s.layout.block) for row in accum]
    assert len(blocks) == len(ours)
    y = codec.decode(payload)
    at = 0
    for (coefficients, elements, transform), (row, block) in zip(blocks, ours, strict=True):
        assert ("fft", "dct", "hadamard", "identity")[transform] == codec.transform
        np.testing.assert_array_equal(np.array(coefficients, np.float32), row)
        part = y[at : at + elements]
        at += elements
        if math.isnan(coefficients[0]):
            assert np.isnan(part).all()
        elif block <= 256:  # the plain transforms take their time
            whole = np.array(
                list(names["elements"](coefficients, block, transform, codec.span or 0))
            )
            slack = transform_error(codec, n) * np.linalg.norm(whole)
            # And 1e-14 for the plain transform's own sum in float64.
            slack += 1e-14 * np.linalg.norm(whole)
            assert np.linalg.norm(whole[:elements] - part) <= slack


@pytest.mark.parametrize("settings", [{"block": None}, {"block": 1 << 20}], ids=str)
def test_a_few_bytes_do_not_ask_for_gigabytes(settings):
    """With theta near one, 2**32 elements have a payload that is small and right in all else."""
    codec = FFTCodec(theta=1 - 2.0**-32, **settings)
    sound = codec.encode(random(1000))
    n = 2**27 if settings["block"] else 2**32
    data = bytearray(codec.payload_bytes(n))
    data[:32] = sound.to_bytes()[:32]
    data[4:12] = struct.pack("<Q", n)
    reseal(data)
    tracemalloc.start()
    for expected in (None, 1000):
        with pytest.raises(PayloadError, match=f"header claims {n} elements"):
            codec.decode(Payload.from_bytes(bytes(data), n=expected))
    with pytest.raises(PayloadError, match="expected 1000"):
        codec.decode(Payload.from_bytes(bytes(data), n=n), n=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) * 4 + (1 << 20)
    assert codec.decode(Payload.from_bytes(sound.to_bytes(), n=1000), n=1000).size == 1000
