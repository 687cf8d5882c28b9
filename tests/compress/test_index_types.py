"""More than 2**31 elements: no index wraps, and what cannot be is refused. No memory is needed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from rivals.codecs import CODECS, codec
from samples import for_each

from sn_compress import CompressError, FFTCodec, Payload
from sn_compress.codecs import fft
from sn_compress.codecs.base import HEADER_BYTES, MAX_ELEMENTS
from sn_compress.ops import codes, indexed, record
from sn_compress.ops.quantize import Layout

ROWS, COLUMNS = 2**17 + 1, 2**16 + 1  # their product is above 2**33
SHAPE = (ROWS, COLUMNS)
N = ROWS * COLUMNS
WIDE = {"topk": {"indices": "int64"}, "dgc": {"indices": "int64"}}
# The positions of those that escape take eight bytes from 2**32 elements on.
WIDE["bounded"] = {"bound": 1.0, "escapes": 0.0}
SHAPED = {name: {"shape": SHAPE} for name in ("auto", "axes", "lowrank", "powersgd", "demo")}
SHAPED["axes"]["axes"] = (1,)
FREE = sorted(CODECS.keys() - {"axes", "lowrank"})  # those that take any n
BIG = (2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**33 + 5, 2**40, MAX_ELEMENTS)


def nothing(n: int, dtype: type = np.float32) -> np.ndarray:
    """[n] zeros over the memory of one."""
    return np.broadcast_to(dtype(0), (n,))


@pytest.fixture
def frugal():
    """Fails a test that allocates more than four MiB."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("name", FREE)
def test_sizes_grow_as_n_does(frugal, name):
    made = codec(name, **WIDE.get(name, {}))
    per_element = made.payload_bytes(2**20) / 2**20
    sizes = [made.payload_bytes(n) for n in BIG]
    assert all(type(size) is int and size % 16 == 0 for size in sizes)
    if name == "demo":  # its chunks are as long as the divisors of n allow
        assert sizes[1] == 32 + 2**31 // 64 * 32 * 12
        return
    assert sizes == sorted(sizes)
    for n, size in zip(BIG, sizes, strict=True):
        # Headers, one-off tables and padding weigh on the small one, at most 1 / 1000 of it;
        # theta as a fraction of 2**32 and floors are far below that. 24 bits of an index or more
        # would be the chunk's affair, not that of n.
        assert abs(size / n - per_element) <= 2e-3 * per_element + 64 / 2**20


@pytest.mark.parametrize("name", SHAPED)
def test_sizes_of_shapes_beyond_32_bits(frugal, name):
    made = codec(name, **SHAPED[name])
    size = made.payload_bytes(N)
    expected = {
        "auto": int(4 * N / 100) // 16 * 16,
        "axes": FFTCodec(transform="identity").payload_bytes(N),
        # 4 columns of 8 bits, a 16-bit range for each, in whole words.
        "lowrank": 32 + -(-4 * 4 * sum(-(-(16 + 8 * side) // 32) for side in SHAPE) // 16) * 16,
        "powersgd": 32 + -(-4 * sum(SHAPE) // 16) * 16,
        "demo": None,
    }[name]
    assert size == expected or expected is None
    with pytest.raises(CompressError, match=str(N % 2**32)):
        made.payload_bytes(N % 2**32) if name != "auto" else made.candidates(N % 2**32)


LIMITS = {"fft": 2 * (2**32 - 1) - 1, "dct": 2**32 - 1, "identity": 2**32 - 1, "hadamard": 2**31}


@pytest.mark.parametrize("transform", LIMITS)
def test_one_transform_over_too_many_is_refused_everywhere(frugal, transform):
    made = FFTCodec(transform=transform, block=None, half=True)
    most = fft.MOST_BINS
    # The transform is padded to a length with small factors: the largest such is what fits.
    fits = LIMITS[transform] // 2
    assert made.payload_bytes(fits) > 2**24
    n = LIMITS[transform] + 2
    refused = rf"bins; expected at most {most}.*Use a block"
    for call in (
        lambda: made.payload_bytes(n),
        lambda: made.new_state(n),
        lambda: made.encode(nothing(n)),
        lambda: made.decode(Payload(nothing(n, np.uint8), 1, n, made.settings)),
        lambda: made.sections(n),
    ):
        with pytest.raises(CompressError, match=refused):
            call()
    # In blocks there is no such limit.
    assert FFTCodec(transform=transform).payload_bytes(n) > 2**24


@for_each("at", (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40))
def test_positions_in_the_vector_are_64_bits_wide(at):
    run = indexed.Run(start=at, count=1, length=2**41, kept=1)
    assert indexed.locate(np.array([7]), [run]).tolist() == [at + 7]
    far = indexed.Run(start=0, count=1, length=2**41, kept=1)
    data = indexed.write_indices(np.array([at], np.int64), 64)
    assert indexed.locate(indexed.read_indices(data, 1, 64), [far]).tolist() == [at]
    assert codes.packed_bytes(at, 3) == -(-3 * at // 8)
    assert codes.bucket_count(at, 512) == -(-at // 512)
    assert codes.bucket_lengths(at, None).tolist() == [at]


@pytest.mark.parametrize(("positions", "parts"), [("bitmap", 1), ("elias-fano", 2)])
def test_the_extension_takes_sizes_beyond_32_bits(core, frugal, parts, positions):
    """No rows, so no memory: the numbers are read, and compared with the sizes of the buffers."""
    bins = fft.MOST_BINS
    block = 2 * (bins - 1) if parts == 2 else bins
    layout = Layout(block, bins // 100, "range", 8, 3, positions, parts)
    assert layout.bins == bins
    words = np.zeros((0, layout.words), np.uint32)
    floats = np.zeros((0, layout.bins * parts), np.float32)
    assert core.decode_records(words, floats, record.numbers(layout), 1.0) == -1
    one = np.zeros(64, np.uint32)
    with pytest.raises(ValueError, match="do not match"):
        core.decode_records(one, one.view(np.float32), record.numbers(layout), 1.0)


def test_the_header_takes_every_legal_n():
    made = codec("fp16")
    for n in BIG:
        buffer = np.zeros(HEADER_BYTES, np.uint8)
        sealed = Payload.seal(buffer, codec_id=22, n=n, settings=made.settings)
        assert Payload.from_bytes(sealed.to_bytes(), n=n).n == n
