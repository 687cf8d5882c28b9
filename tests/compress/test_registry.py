"""Every codec by name, those of benchmarks too, and what all of them promise."""

import copy
import itertools
import math
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import samples
from fuzz import reseal
from rivals.codecs import CODECS, RIVALS, codec, presets
from samples import TINY, U, alike, random

import sn_compress
from sn_compress import CompressError, Payload, PayloadError
from sn_compress.codecs import fft, registry
from sn_compress.codecs.base import MAX_ELEMENTS, SETTINGS_BYTES

SIZES = (0, 1, 31, 32, 33, 63, 1000, 4097)


def pair(n: int) -> tuple[int, int]:
    """The squarest (rows, columns) with rows * columns = n."""
    rows = next((d for d in range(math.isqrt(n), 0, -1) if n % d == 0), 0)
    return rows, n // rows if rows else 0


# Name of the case -> codec for n elements; between them every branch of every format.
CASES = {
    "fft": lambda n: codec("fft"),
    "fft paper": lambda n: codec("fft", preset="paper"),
    "dct": lambda n: codec("dct"),
    "hadamard": lambda n: codec("hadamard", values="2bit"),
    "topk": lambda n: codec("topk"),
    "topk grace": lambda n: codec("topk", preset="grace"),
    "topk compact": lambda n: codec("topk", preset="compact", decay=1.0),
    "topk fp16": lambda n: codec("topk", theta=0.9, chunk=50, indices="packed", values="fp16"),
    "topk all": lambda n: codec("topk", theta=0.0, chunk=2, indices="int32"),
    "qsgd": lambda n: codec("qsgd"),
    "qsgd grace": lambda n: codec("qsgd", preset="grace"),
    "qsgd paper": lambda n: codec("qsgd", preset="paper"),
    "qsgd ternary": lambda n: codec("qsgd", levels=1, bucket=33, seed=2**64 - 1),
    "terngrad": lambda n: codec("terngrad"),
    "terngrad grace": lambda n: codec("terngrad", preset="grace"),
    "terngrad paper": lambda n: codec("terngrad", preset="paper", bucket=32, clip=None),
    "dgc": lambda n: codec("dgc", theta=0.9),
    "dgc grace": lambda n: codec("dgc", preset="grace", momentum=0.0),
    "dgc clip": lambda n: codec("dgc", theta=0.99, clip=0.5, momentum=0.0),
    "onebit": lambda n: codec("onebit"),
    "onebit grace": lambda n: codec("onebit", preset="grace"),
    "onebit sign": lambda n: codec("onebit", preset="ef-sign"),
    "powersgd": lambda n: codec("powersgd"),
    "powersgd rank 2": lambda n: codec("powersgd", shape=pair(n), rank=2),
    "bounded": lambda n: codec("bounded", bound=0.05),
    "bounded free": lambda n: codec("bounded", bound=math.inf, bits=8, group=32, escapes=0.1),
    "bounded two bits": lambda n: codec("bounded", preset="actnn", seed=5),
    "bounded narrow": lambda n: codec("bounded", bound=1e-3, bits=1, escapes=0),
    "fp16": lambda n: codec("fp16"),
    "bf16": lambda n: codec("bf16"),
    "fp8": lambda n: codec("fp8"),
    "demo": lambda n: codec("demo", topk=4, decay=1.0),
    "demo matrix": lambda n: codec("demo", shape=pair(n), preset="paper", decay=1.0),
}
TRANSFORMS = ("fft", "dct", "hadamard")
# Bound to a shape, and to an n above zero: these keep the same promises in files of their own.
ELSEWHERE = {
    "axes": "test_fft.py",
    "lowrank": "rivals/test_lowrank.py",
    "auto": "rivals/test_auto.py",
}
NEEDED = {"axes": {"shape": (9, 9), "axes": (1,)}, "lowrank": {"shape": (9, 9)}}
NEEDED["bounded"] = {"bound": 1.0}
BEYOND_HALF = ("spike", "largest", "wide", "huge spike")
KEEPS_INF = ("fp16", "bf16", "bounded")  # and sends it as it is; all others send NaN
every_case = pytest.mark.parametrize("case", CASES)


def sizes(case: str, turn: int) -> tuple[int, int]:
    """Two sizes of a test's turn: in four turns a case meets all of them."""
    at = (list(CASES).index(case) + turn) % 4
    return SIZES[at], SIZES[at + 4]


def specials(n: int) -> dict[str, np.ndarray]:
    """Finite vectors that trip careless code, and one of NaN; [n] float32 each."""
    spike = np.zeros(n, np.float32)
    spike[n // 2 : n // 2 + 1] = 1e36
    found = samples.specials(n) | {"random": random(n), "spike": spike}
    return found | {"largest": spike * np.float32(300), "NaN": np.full(n, np.nan, np.float32)}


@every_case
def test_size_follows_from_settings_and_n_and_bytes_are_all_a_decoder_needs(case):
    for n in sizes(case, 0):
        made, other = CASES[case](n), CASES[case](n)
        size = made.payload_bytes(n)
        assert size % 16 == 0
        for name, x in specials(n).items():
            state = made.new_state(n)
            payload = made.encode(x, state=state)
            data = payload.to_bytes()
            assert payload.nbytes == size == len(data)
            assert (payload.n, payload.codec_id) == (n, made.codec_id)
            y = other.decode(Payload.from_bytes(data))
            assert (y.dtype, y.shape) == (np.float32, (n,))
            np.testing.assert_array_equal(y, made.decode(payload))
            if name.endswith("zeros"):
                assert payload.energy == payload.error == 0
                assert not y.any()
                assert not made.state_to_values(state, n).any()
            if case in ("fft paper", "fp16") and name in BEYOND_HALF:
                continue  # beyond half precision, documented
            if case.startswith(("demo", *TRANSFORMS)) and name == "largest":
                continue  # within a factor sqrt(n) of the largest number, transforms overflow
            assert np.isfinite(y).all() or name == "NaN", name
            assert all(np.isfinite(part).all() for part in state), name


@every_case
def test_non_finite_arrives_and_is_never_remembered(case):
    for n, bad in ((1, np.nan), (33, np.inf), (33, -np.inf), (4097, np.nan)):
        made = CASES[case](n)
        state = made.new_state(n)
        made.encode(random(n), state=state)
        before = made.state_to_values(state, n)
        x = random(n, 1)
        x[n // 2] = bad
        payload = made.encode(x, state=state)
        y = made.decode(payload)
        assert not np.isfinite(y[n // 2])
        assert np.isnan(y[n // 2]) or case.startswith(KEEPS_INF)
        assert all(np.isfinite(part).all() for part in state)
        after = made.state_to_values(state, n)
        # Where NaN was sent the memory is what it was; other blocks and buckets go on.
        assert np.array_equal(after[np.isnan(y)], before[np.isnan(y)])
        following = made.encode(random(n, 2), state=state)
        assert np.isfinite(made.decode(following)).all()
        assert not np.isfinite(made.decode_mean([following, payload, following])[n // 2])


@every_case
def test_equal_states_give_equal_bytes(case):
    """Of the codec that `repr` says, too."""
    for n in sizes(case, 1):
        made = CASES[case](n)
        again = eval(repr(made), {type(made).__name__: type(made)})
        assert repr(again) == repr(made)
        state = made.new_state(n)
        for step in range(3):
            twin = copy.deepcopy(state)
            x = random(n, step)
            kept = x.copy()
            first = made.encode(x, state=state).to_bytes()
            assert first == again.encode(x, state=twin).to_bytes()
            alike(state, twin)
            assert np.array_equal(x, kept), "encode changed its input"


def transform_error(case: str, n: int) -> float:
    """Relative error, in the 2-norm, of one float32 inverse transform; 0 where there is none."""
    if case.startswith(TRANSFORMS):
        return samples.transform_error(CASES[case](n), n)
    # Of DeMo a cosine transform along each of two axes of up to 64.
    return 2 * samples.dct_error(64) if case.startswith("demo") else 0.0


@every_case
def test_mean_is_the_mean(case):
    for n, r in zip(sizes(case, 2), (2, 3), strict=True):
        made = CASES[case](n)
        payloads = [made.encode(random(n, rank)) for rank in range(r)]
        alone = [made.decode(payload).astype(np.float64) for payload in payloads]
        error = made.decode_mean(payloads).astype(np.float64) - sum(alone) / r
        # One rounding of the weight, one of each product, and r of sums that start from zero. The
        # transform is made once for the mean and once for each vector.
        relative = (r + 2) * U + 2 * transform_error(case, n)
        scale = sum(np.linalg.norm(y) for y in alone) / r
        assert np.linalg.norm(error) <= 1.01 * relative * scale + r * TINY * math.sqrt(n)


REMEMBERING = [case for case in CASES if getattr(CASES[case](0), "error_feedback", False)]
CONSERVING = [case for case in REMEMBERING if case not in ("dgc", "dgc clip")]


@pytest.mark.parametrize("case", CONSERVING)
def test_nothing_is_lost_over_the_steps(case):
    """What arrived and what is still remembered add up to what went in."""
    for n in sizes(case, 3):
        made = CASES[case](n)
        state = made.new_state(n)
        total, arrived, bound = np.zeros((3, n))
        for step in range(6):
            x = random(n, step)
            wanted = np.abs(x.astype(np.float64) + made.state_to_values(state, n))
            arrived += made.decode(made.encode(x, state=state))
            total += x
            # Adding the memory rounds once, and what is left over rounds once more.
            bound += U * (wanted + np.abs(made.state_to_values(state, n))) + TINY
        missing = total - arrived - made.state_to_values(state, n)
        assert (np.abs(missing) <= 1.01 * bound).all()


@pytest.mark.parametrize("case", REMEMBERING)
def test_memory_goes_out_as_a_vector_comes_back_and_is_scaled_by_decay(case):
    made = CASES[case](1000)
    x = random(1000)
    assert np.array_equal(made.state_to_values(made.values_to_state(x), 1000), x)
    state, other = made.new_state(1000), made.new_state(1000)
    for each in (state, other):
        made.encode(x, state=each)
    made.encode(random(1000, 1), state=state, decay=0.5)
    # Half the memory by hand, in powers of two, so exactly.
    memory = other[1] if case.startswith("dgc") else other[0]
    memory *= np.float32(0.5)
    made.encode(random(1000, 1), state=other)
    alike(state, other)


@every_case
def test_what_is_taken_as_a_vector(case):
    made = CASES[case](1000)
    for dtype in (np.float16, pytest.importorskip("ml_dtypes").bfloat16):
        x = random(1000).astype(dtype)
        wide = x.astype(np.float32)
        expected = made.encode(wide).to_bytes()
        assert made.encode(x).to_bytes() == expected
        assert made.encode(np.repeat(wide, 2)[::2]).to_bytes() == expected
    for wrong, message in (
        (np.zeros((50, 20), np.float32), r"shape \(50, 20\); expected one dimension. Flatten"),
        (np.zeros(1000), "dtype float64; expected float32, float16 or bfloat16"),
        (np.ones(9, np.int32), r"dtype int32.*Cast it: values\.astype\('float32'\)"),
        ([1.0, 2.0], "dtype float64"),
        (np.float32(1), r"shape \(\)"),
    ):
        with pytest.raises(CompressError, match=message):
            made.encode(wrong)
    with pytest.raises(CompressError, match="at least one payload"):
        made.decode_mean([])


@every_case
def test_forged_headers_are_refused_before_anything_is_allocated(case):
    n = 1000
    made = CASES[case](n)
    original = made.encode(random(n)).to_bytes()
    tracemalloc.start()
    for claimed in (0, n - 1, n + 1, 2**31 + 1, 2**32 + n, MAX_ELEMENTS, 2**63):
        data = bytearray(original)
        data[4:12] = struct.pack("<Q", claimed)
        try:
            y = made.decode(Payload.from_bytes(reseal(data)))
        except PayloadError:
            continue
        # Padding to 16 bytes lets a few neighbours of n have the same size.
        assert y.size == claimed
        assert abs(claimed - n) <= 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    for cut in (original[:-16], original + bytes(16)):
        with pytest.raises(PayloadError):
            made.decode(Payload.from_bytes(reseal(bytearray(cut))))


def test_payloads_of_other_codecs_are_refused():
    n = 64
    made = [codec(name) for name in ("topk", "qsgd", "terngrad", "dgc", "onebit", "fp16", "bf16")]
    for own, other in itertools.permutations(made, 2):
        with pytest.raises(PayloadError, match="settings it was encoded with"):
            own.decode(other.encode(random(n)))
    n = 81
    for rival in RIVALS:  # which only benchmarks have
        payload = codec(rival, **NEEDED.get(rival, {})).encode(random(n))
        for name in registry.CODECS:
            with pytest.raises(PayloadError, match=f"payload of codec {payload.codec_id} with"):
                codec(name, **NEEDED.get(name, {})).decode(payload)


def test_every_name_gives_a_codec_with_an_id_of_its_own():
    ids = {}
    for name in CODECS:
        made = codec(name, **NEEDED.get(name, {}))
        assert isinstance(made, sn_compress.Codec)
        assert len(made.settings) == SETTINGS_BYTES
        assert ids.setdefault(made.codec_id, type(made)) is type(made)
    assert len(set(ids.values())) == len(ids)
    assert {case.split()[0] for case in CASES} | set(ELSEWHERE) == set(CODECS)
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE.values())


def test_presets_make_codecs_and_name_their_source():
    for name in CODECS:
        for preset, row in presets(name).items():
            assert len(row.source) > 20
            made = codec(name, preset=preset)
            for key, value in row.settings.items():
                assert getattr(made, key) == value
    assert presets("fft")["paper"].settings == fft.PAPER
    own = codec("topk", preset="grace", theta=0.99)
    assert (own.theta, own.indices) == (0.99, "int64"), "settings win over the preset"


def test_what_rivals_ship_costs_what_they_ship():
    """Bytes behind the header, at n = 2**20, as the published code lays them out."""
    n = 2**20

    def body(name, **settings):
        return codec(name, **settings).payload_bytes(n) - 32

    def padded(size):
        return -(-size // 16) * 16

    assert body("qsgd", preset="grace") == padded(2 * n + 4)
    assert body("terngrad", preset="grace") == padded(n + 4)
    assert body("onebit", preset="grace") == padded(n + 8)
    # floor((1 - 0.7) n) in float64 is floor(0.3 n), plus or minus nothing at this n.
    assert body("topk", preset="grace") == padded(12 * int(0.3 * n))
    # 12 + 2 bits for 64 of each 4096, and a table of four means: 146.3 times less than float32.
    assert body("topk", preset="compact") == padded(n // 64 * 14 // 8 + 16)


def test_mistakes_are_named():
    with pytest.raises(
        CompressError, match="no codec is called 'zip'; known: axes, bf16, bounded, dct, fft"
    ):
        sn_compress.codec("zip")
    with pytest.raises(CompressError, match="no preset 'grac'; it has: grace, paper"):
        codec("qsgd", preset="grac")
    with pytest.raises(CompressError, match=r"level.*Its settings are: levels, bucket"):
        codec("qsgd", level=3)
    with pytest.raises(CompressError, match="fixes dtype='fp16'"):
        codec("fp16", dtype="bf16")


@pytest.mark.parametrize(("name", "settings"), [
    ("topk", {"theta": 1.0}), ("topk", {"theta": "0.5"}), ("topk", {"chunk": 1}),
    ("topk", {"indices": "int8"}), ("topk", {"indices": "packed"}), ("topk", {"values": "fp8"}),
    ("topk", {"decay": 0}), ("qsgd", {"levels": 0}), ("qsgd", {"levels": True}),
    ("qsgd", {"levels": 2.0}), ("qsgd", {"bucket": 0}), ("qsgd", {"norm": "l1"}),
    ("qsgd", {"packing": "elias"}), ("qsgd", {"seed": -1}), ("terngrad", {"clip": 0}),
    ("terngrad", {"clip": math.nan}), ("terngrad", {"spread": "mad"}),
    ("terngrad", {"bucket": 2**32}), ("onebit", {"variant": "2bit"}),
    ("onebit", {"packing": "words"}), ("bounded", {"form": "huffman", "bound": 1.0}),
    ("bounded", {"bound": 0.0}), ("bounded", {"bound": math.inf, "form": "paper"}),
    ("bounded", {"bits": 3, "bound": 1.0}), ("bounded", {"group": 100, "bound": 1.0}),
    ("bounded", {"escapes": 1.5, "bound": 1.0}), ("bounded", {"seed": -1, "bound": 1.0}),
    ("bounded", {"threads": 0, "bound": 1.0}), ("bounded", {"measure": 1, "bound": 1.0}),
    ("powersgd", {"shape": (2, 3, 4)}), ("dgc", {"momentum": 1.0}), ("demo", {"topk": 0}),
])  # fmt: skip
def test_illegal_settings_are_refused(name, settings):
    key = next(iter(settings))
    with pytest.raises(CompressError, match=f"{key}=.*(expected|needs)"):
        codec(name, **settings)


def test_sizes_beyond_int32_are_arithmetic_only():
    """Of all of them: test_index_types.py."""
    for name in ("topk", "dgc"):
        with pytest.raises(CompressError, match="int64"):
            codec(name).payload_bytes(2**31 + 1)


def test_a_codec_is_loaded_when_it_is_named_and_the_name_stays_a_function():
    script = """
import sys, sn_compress
sn_compress.codec("qsgd")
loaded = {name for name in sys.modules if name.startswith("sn_compress.codecs.")}
assert loaded == {f"sn_compress.codecs.{it}" for it in ("base", "registry", "qsgd", "frame")}
import sn_compress.codecs.fft
assert callable(sn_compress.codec)
assert not {"torch", "tensorflow", "horovod", "cupy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
