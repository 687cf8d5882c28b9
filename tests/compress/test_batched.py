"""The FFT codec as array code: held against the codec of the host, whose bytes it has to make."""

import math
import zlib

import numpy as np
import pytest
import torch
from samples import U, alike, edges, layouts, norm, random, specials, transform_error
from test_sums import Launches

from sn_compress import CompressError, FFTCodec, PayloadError
from sn_compress.codecs import batched
from sn_compress.codecs.base import Payload
from sn_compress.ops import bits, record
from sn_compress.ops.checksum import RUN, Checksums, crc
from sn_compress.ops.record_arrays import Records
from sn_compress.prediction.cost import layers

SIZES = (0, 1, 31, 32, 33, 63, 1000, 4097, 2**16 + 1)
LIBRARIES = {"numpy": np.copy, "torch": lambda array: torch.from_numpy(array.copy())}
EXACT = [  # whose transforms have the same bits in all libraries
    {"transform": "identity"},
    {"transform": "identity", "theta": 0.0, "block": 64, "bits": 4, "mantissa": 1},
    {"transform": "identity", "theta": 1 - 2**-32, "bits": 16, "mantissa": 9},
    {"transform": "identity", "theta": 0.5, "positions": "bitmap", "half": True},
    {"transform": "hadamard", "theta": 0.9, "bits": 12, "mantissa": 5},
    {"transform": "identity", "block": None, "theta": 0.9, "window": 0.3},
    {"transform": "identity", "theta": 0.9, "values": "2bit"},
    {"transform": "hadamard", "theta": 0.0, "values": "2bit", "block": 64},
    {"transform": "identity", "theta": 0.9, "values": "fp16", "block": None},
    {"transform": "hadamard", "theta": 0.5, "values": "sign"},
]


def bytes_of(payload_words, codec, sizes):
    """The payloads in one row of words, as bytes."""
    rest, found = np.asarray(payload_words).view(np.uint8), []
    for n in sizes:
        found.append(rest[: codec.payload_bytes(n)])
        rest = rest[codec.payload_bytes(n) :]
    assert not rest.size
    return found


def drawn(codec, rng, n):
    """A memory with something in it, but where it would say nothing of a real vector."""
    parts = [rng.standard_normal(it.shape).astype(np.float32) / 8 for it in codec.new_state(n)]
    for section, part in zip(codec.sections(n), parts, strict=True):
        part[:, edges(section.layout)] = 0
    return parts


@pytest.mark.parametrize("library", LIBRARIES)
def test_records_are_those_of_the_host_bit_for_bit(library):
    make = LIBRARIES[library]
    some = layouts((32, 1024), (0.0, 0.5, 0.98))
    for seed, layout in enumerate(some):
        rng, records = np.random.default_rng(seed), Records(layout)
        decay = (1.0, 0.9)[seed % 2]
        shape = (8, layout.bins * layout.parts)
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, (8, 1))
        values = values.astype(np.float32)
        values[1], values[2], values[3, 5], values[6, 0] = 0, 1, np.nan, 1e38
        values[4] = np.round(values[4] / np.abs(values[4]).max() * 3)  # many ties
        values[5] *= 1e-30  # denormal
        values[7, 2] = -np.inf
        values[:, edges(layout)] = 0
        memory = (rng.standard_normal(shape) / 8).astype(np.float32)
        memory[:, edges(layout)] = memory[0] = 0
        words, left = np.zeros((8, layout.words), np.uint32), memory.copy()
        tally = record.encode_records(values.copy(), left, words, layout, decay)
        made = records.encode(make(values), make(memory), decay, tally=True)
        np.testing.assert_array_equal(np.asarray(bits.as_int32(made.words)).view("u4"), words)
        np.testing.assert_array_equal(np.asarray(made.residual), left)
        # Both are sums of squares in float32 of one sign, of at most `bins` terms in some order.
        near = {"rtol": 2 * layout.bins * U, "atol": 0}
        np.testing.assert_allclose(float(made.energy.sum()), tally.energy, **near)
        np.testing.assert_allclose(float(made.error.sum()), tally.error, **near)
        expected = np.zeros(shape, np.float32)
        record.decode_records(words, expected, layout, 0.5)
        read = records.decode(bits.as_int64(make(words.view(np.int32))))
        assert not read.damaged.any()
        found = make(np.zeros((8 * layout.bins, layout.parts), np.float32))
        found = np.asarray(records.add(found, read, 0.5)).reshape(shape)
        there = ~np.isnan(expected[:, 0])
        assert there.tolist() == [True] * 3 + [False] + [True] * 3 + [False]
        np.testing.assert_array_equal(~np.asarray(read.missing), there)
        np.testing.assert_array_equal(found[there], expected[there])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("settings", EXACT, ids=str)
def test_payloads_are_those_of_the_codec_byte_for_byte(library, settings):
    """And memories; all sizes and all kinds of values in one call."""
    codec, make, rng = FFTCodec(**settings), LIBRARIES[library], np.random.default_rng(3)
    vectors = [random(n, n) for n in SIZES] + list(specials(5000).values())
    bad = [random(9000, seed) for seed in (1, 2)]
    bad[0][4097], bad[1][8999] = np.nan, np.inf
    vectors += bad
    sizes = [len(vector) for vector in vectors]
    memories = [drawn(codec, rng, n) for n in sizes]
    with np.errstate(over="ignore"):
        given = [[make(part) for part in memory] for memory in memories]
        made = batched.encode(codec, [make(it) for it in vectors], given, decay=0.9)
        own = [codec.encode(v, state=m, decay=0.9) for v, m in zip(vectors, memories, strict=True)]
    for payload, found in zip(own, bytes_of(made.words, codec, sizes), strict=True):
        assert found.tobytes() == payload.to_bytes()
    alike(made.memories, memories)
    wires = np.stack([np.asarray(made.words)] * 2)
    read = batched.decode(codec, make(wires), sizes)
    assert not read.damaged
    for payload, mean in zip(own, read.means, strict=True):
        np.testing.assert_array_equal(np.asarray(mean), codec.decode_mean([payload, payload]))


@pytest.mark.parametrize("settings", [
    {}, {"span": 64}, {"theta": 0.5, "positions": "bitmap", "block": 256, "span": 32},
    {"transform": "dct"}, {"block": None, "transform": "dct"}, {"block": None},
    {"transform": "axes", "shape": (45, 20, 3, 3), "axes": (2, 3)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("library", LIBRARIES)
def test_another_transform_changes_no_more_than_its_last_bits(library, settings):
    """Vectors are as near to what was encoded; who is near the threshold may be another."""
    codec = FFTCodec(**{"theta": 0.9} | settings)
    sizes = [8100] if "shape" in settings else [8192, 4097, 33]
    vectors = [random(n, n) for n in sizes]
    words = batched.encode(codec, [LIBRARIES[library](it) for it in vectors]).words
    means = batched.decode(codec, words[None], sizes).means
    for vector, buffer, mean in zip(vectors, bytes_of(words, codec, sizes), means, strict=True):
        own, other = codec.encode(vector), Payload.from_bytes(buffer, n=vector.size)
        found = codec.decode(other)
        assert norm(found - vector) <= norm(codec.decode(own) - vector) * (1 + 1e-3)
        # What differs was at the threshold, or one rung apart.
        assert norm(found - codec.decode(own)) < 1e-2 * norm(codec.decode(own))
        assert norm(np.asarray(mean) - found) <= 2 * transform_error(codec, vector.size) * norm(
            found
        )


@pytest.mark.parametrize("library", LIBRARIES)
def test_checksums_of_payloads_side_by_side(library):
    sizes = [8, 12, 16, 4 * RUN, 4 * RUN + 4, RUN * RUN, RUN * RUN + 4, 2**17 + 20]
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, (2, sum(sizes))).astype(np.int32)
    found = np.asarray(Checksums(sizes).of(LIBRARIES[library](words)))
    assert found.dtype == np.int32
    for row, sums in zip(words, found, strict=True):
        parts = np.split(row, np.cumsum(sizes)[:-1])
        assert [int(each) & 0xFFFFFFFF for each in sums] == [crc(it.view("u1")) for it in parts]


# Which words of a payload are damaged, and how.
DAMAGE = {
    "another n": (slice(1, 2), lambda words: words ^ 1),
    "other settings": (slice(3, 4), lambda words: words ^ 1),
    "range not finite": (slice(8, 9), lambda words: words | 0x7F80),
    "positions": (slice(25, 30), lambda words: words | 0xFFFFFFFF),
    "a bit on the way": (slice(9, 10), lambda words: words ^ (1 << 17)),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_a_flag_and_the_tensors_mean_is_nan(library, kind):
    codec, sizes = FFTCodec(), [5000, 8192, 100]
    made = batched.encode(codec, [random(n, n) for n in sizes])
    bad = made.words.copy()
    own = bad.view(np.uint32)[codec.payload_bytes(5000) // 4 :][: codec.payload_bytes(8192) // 4]
    where, damaged = DAMAGE[kind]
    own[where] = damaged(own[where])
    if kind != "a bit on the way":  # the others have a checksum that is right
        own[7] = 0
        own[7] = zlib.crc32(own.tobytes())
    whole = batched.decode(codec, np.stack([made.words] * 3), sizes)
    assert not whole.damaged
    make = LIBRARIES[library]
    read = batched.decode(codec, make(np.stack([made.words, bad, made.words])), sizes)
    assert read.damaged
    found = [np.asarray(mean) for mean in read.means]
    assert np.isnan(found[1][:4096]).all()
    for at in (0, 2):
        np.testing.assert_allclose(found[at], whole.means[at], rtol=0, atol=1e-5)


def step(batch, gradients, memories):
    """Of two ranks that are alike, from gradients to the mean."""
    made = batch.encode(gradients, memories, unused_waits=True, tally=True)
    read = batch.decode(torch.stack([made.words] * 2))
    return made.words, made.memories, made.numbers, read.means, read.damaged


@pytest.mark.parametrize("settings", [
    {"span": 64}, {"transform": "dct", "positions": "bitmap"},
    {"transform": "hadamard", "window": 0.5}, {"block": None},
], ids=str)  # fmt: skip
def test_no_value_is_read(settings):
    """Tensors of device `meta` have none."""
    codec, sizes = FFTCodec(**settings), (4097, 1000, 2**16, 0)
    gradients = [torch.zeros(n, device="meta", dtype=torch.bfloat16) for n in sizes]
    memories = [batched.new_memory(codec, n, gradients[0]) for n in sizes]
    batch = batched.batch_of(codec, sizes)
    words, kept, numbers, means, damaged = step(batch, gradients, memories)
    assert words.device.type == damaged.device.type == numbers.device.type == "meta"
    assert words.shape == (batched.words_of(codec, sizes),)
    assert [tuple(it.shape) for it in means] == [(n,) for n in sizes]
    assert all(it.dtype == torch.float32 for it in means)
    shapes = [[tuple(part.shape) for part in memory] for memory in kept]
    assert shapes == [batched.memory_shapes(codec, n) for n in sizes]


# array-api-compat keeps in a cache which library a class is of; traced through, it is the same.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_step_is_one_graph():
    codec, sizes = FFTCodec(span=64), (8192,)
    batch, rng = batched.batch_of(codec, sizes), np.random.default_rng(6)
    gradients = [torch.from_numpy(random(n, n)) for n in sizes]
    memories = [[torch.from_numpy(it) for it in drawn(codec, rng, n)] for n in sizes]
    expected = step(batch, gradients, memories)
    captured = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = captured(batch, gradients, memories)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def launches(sizes):
    """Of encoding and decoding a bucket of eight ranks on a device."""
    codec = FFTCodec(span=64)
    gradients = [torch.zeros(n, device="meta") for n in sizes]
    memories = [batched.new_memory(codec, n, gradients[0]) for n in sizes]
    for _ in range(2):  # the first makes what follows from shapes
        with Launches() as launched:
            made = batched.encode(codec, gradients, memories, unused_waits=True)
            batched.decode(codec, torch.stack([made.words] * 8), sizes)
    return launched.count


def test_a_step_of_resnet50_is_few_launches():
    """As many as of five of its tensors: blocks of one length go together."""
    sizes = [math.prod(layer.shape) for layer in layers("resnet50") if len(layer.shape) > 1]
    assert len(sizes) == 54
    assert launches(sizes) < min(600, 1.2 * launches(sizes[:5]))


def test_what_array_code_has_no_form_of():
    vector = random(5000)
    with pytest.raises(CompressError, match='window="payload" as array code'):
        batched.encode(FFTCodec(window="payload"), [vector])
    codec = FFTCodec()
    wire = batched.encode(codec, [vector]).words
    with pytest.raises(PayloadError, match="same settings"):
        batched.decode(codec, wire[None, 1:], [5000])
