"""Low rank: factors in few bits, warm starts, memory."""

import copy
import math

import numpy as np
import pytest
from rivals.codecs.lowrank import LowRankCodec
from samples import U, norm, random

from sn_compress import CompressError, FFTCodec
from sn_compress.ops.products import cut, directions

REST = FFTCodec(theta=0.95, transform="identity", block=256, bits=4, mantissa=1)
CODECS = [
    LowRankCodec(shape=(40, 60), rank=4),
    LowRankCodec(shape=(60, 8, 5), rank=1, bits=16),
    LowRankCodec(shape=(40, 60), rank=2, bits=6, mantissa=2, rest=REST),
    LowRankCodec(shape=(2400,), rank=1),
]
N = 2400
every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def low_rank(rows: int, columns: int, rank: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """A matrix with `rank` equal singular values, flat float32."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((m, rank)))[0] for m in (rows, columns))
    return (left @ right.T * scale).reshape(-1).astype(np.float32)


def coder_error(bits: int, mantissa: int, size: int) -> float:
    """Error of a coded column over its norm: relative inside the window, half its lowest value or,
    on the negative side, of the one above it, below; the window reaches down from the peak, which
    is at most the norm."""
    if bits == 16:  # half precision
        return 2.0**-11 + math.sqrt(size) * 2.0**-39
    octaves = 2.0 ** (bits - 1 - mantissa)
    return 2.0 ** -(mantissa + 1) + math.sqrt(size) * 2.0**-octaves


@pytest.mark.parametrize(("shape", "rank", "true", "scale", "bits", "mantissa"), [
    ((40, 60), 4, 4, 1.0, 8, 3), ((40, 60), 4, 2, 1e20, 6, 2), ((60, 8, 5), 1, 1, 1e-20, 16, 0),
    ((17, 90), 17, 3, 1.0, 10, 5), ((2400,), 1, 1, 1e20, 8, 3),
    ((3, 3, 16, 24), 4, 4, 1.0, 16, 0),  # of Keras: its matrix has 144 rows
])  # fmt: skip
def test_a_matrix_of_its_rank_comes_back(shape, rank, true, scale, bits, mantissa):
    rows, columns = cut(shape)
    codec = LowRankCodec(shape=shape, rank=rank, bits=bits, mantissa=mantissa)
    x = low_rank(rows, columns, true, scale=scale)
    error = norm(codec.decode(codec.encode(x)) - x.astype(np.float64)) / norm(x)
    # P is orthonormal and spans x. Coded, it is off by e in the Frobenius norm; Q fitted to that
    # (ridge 1e-6) leaves no more than the exact Q would, sqrt(e**2 + 1e-6) |x|. Q itself is at
    # most |x| / (1 - e), and its own coding is multiplied by the coded P, at most 1 + e.
    e = coder_error(bits, mantissa, rows) * math.sqrt(rank)
    bound = math.sqrt(e**2 + 1e-6) + coder_error(bits, mantissa, columns) * (1 + e) / (1 - e)
    # Six products of float32 matrices, sums of at most 2400, well conditioned.
    assert e >= 1 or error <= bound + 6 * max(rows, columns) * U
    assert error <= 0.5


@every_codec
def test_the_memory_adds_up(codec):
    state = codec.new_state(N)
    sent, went_in, slack = np.zeros(N), np.zeros(N), 0.0
    for step in range(10):
        x, decay = random(N, step), (1.0, 0.5)[step % 2]
        before = state.memory.copy()
        payload = codec.encode(x, state=state, decay=decay)
        decoded = codec.decode(payload)
        went_in += x - (1 - decay) * before.astype(np.float64)
        sent += decoded
        # A sum and a difference of float32, and one decoding against another (rank + 2 terms).
        slack += 3 * U * (norm(x) + norm(before)) + 8 * U * norm(decoded)
        assert norm(state.memory) == pytest.approx(math.sqrt(payload.error), rel=8 * U)
    assert norm(sent + state.memory - went_in) <= slack
    np.testing.assert_array_equal(codec.state_to_values(state, N), state.memory)
    np.testing.assert_array_equal(codec.values_to_state(state.memory).memory, state.memory)


@every_codec
def test_non_finite_is_all_nan_and_leaves_the_state(codec):
    state = codec.new_state(N)
    codec.encode(random(N), state=state)
    for bad in (np.nan, np.inf):
        before, x = copy.deepcopy(state), random(N, 1)
        x[1234] = bad
        payload = codec.encode(x, state=state)
        assert np.isnan(codec.decode(payload)).all()
        np.testing.assert_array_equal(state.memory, before.memory)
        np.testing.assert_array_equal(state.start, before.start)
        assert np.isnan(codec.decode_mean([codec.encode(random(N)), payload])).all()


@pytest.mark.parametrize(("settings", "message"), [
    ({"shape": (10, 0)}, "expected sizes above zero"),
    ({"shape": (10, 5), "rank": 6}, "a rank from 1 to 5"),
    ({"shape": (10, 5), "bits": 3}, "4 to 16 bits"),
    ({"shape": (10, 5), "mantissa": 9}, "legal are 1 to 7"),
])  # fmt: skip
def test_illegal_settings(settings, message):
    with pytest.raises(CompressError, match=message):
        LowRankCodec(**settings)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_directions_are_those_of_the_decomposition(rounds):
    """The angle to the leading three, whose rival is 0.1 as strong, shrinks with its square."""
    rng = np.random.default_rng(7)
    u, v = (np.linalg.qr(rng.standard_normal((side, 12)))[0] for side in (50, 70))
    sigma = np.array([1.0, 0.9, 0.8] + [0.08] * 9)
    matrix = (u * sigma) @ v.T
    start = rng.standard_normal((70, 3))
    p = directions(matrix, start, rounds)
    np.testing.assert_allclose(p.T @ p, np.eye(3), atol=50 * 2.0**-52)
    missed = np.linalg.norm(u[:, :3] - p @ (p.T @ u[:, :3]), 2)
    outside = np.linalg.norm(v[:, 3:].T @ start, 2)
    least = np.linalg.svd(v[:, :3].T @ start, compute_uv=False)[-1]
    assert missed <= 0.1 ** (2 * rounds + 1) * outside / least + 50 * 2.0**-52
