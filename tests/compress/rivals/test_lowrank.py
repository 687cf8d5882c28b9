"""Low rank: factors in few bits, warm starts, memory."""

import copy
import math

import numpy as np
import pytest
from rivals.codecs.lowrank import LowRankCodec
from samples import U, for_each, norm, random

from sn_compress import CompressError, FFTCodec
from sn_compress.ops.products import cut, directions, first_factor

REST = FFTCodec(theta=0.95, transform="identity", block=256, bits=4, mantissa=1)
CODECS = [
    LowRankCodec(shape=(40, 60), rank=4),
    LowRankCodec(shape=(60, 8, 5), rank=1, bits=16),
    LowRankCodec(shape=(24, 100), rank=3, bits=4, mantissa=1),
    LowRankCodec(shape=(40, 60), rank=2, bits=6, mantissa=2, rest=REST),
    LowRankCodec(shape=(2400,), rank=1),
    LowRankCodec(shape=(1, 2400), rank=1),
]
N = 2400


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


@pytest.mark.parametrize(("bits", "mantissa"), [(8, 3), (6, 2), (10, 5), (16, 0)])
@for_each("scale", (1.0, 1e-20, 1e20))
@pytest.mark.parametrize(("shape", "rank", "true"), [
    ((40, 60), 4, 4), ((40, 60), 4, 2), ((60, 8, 5), 1, 1), ((17, 90), 17, 3), ((2400,), 1, 1),
])  # fmt: skip
def test_a_matrix_of_its_rank_comes_back(backend, shape, rank, true, scale, bits, mantissa):
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


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_energy_and_error_are_the_measured_ones(backend, codec):
    state = codec.new_state(N)
    for step in range(5):
        x = random(N, step) * np.float32(10.0 ** (step - 2))
        target = x.astype(np.float64) + state.memory
        payload = codec.encode(x, state=state)
        assert payload.energy == pytest.approx(np.square(target).sum(), rel=8 * U)
        made = norm(target - codec.decode(payload))
        # The residual is rounded where it is computed, a multiple of U of what is subtracted.
        slack = 4 * U * (norm(target) + 2 * norm(codec.decode(payload)))
        assert abs(math.sqrt(payload.error) - made) <= slack
        assert made <= norm(target) * (1 + 4 * U)
        assert norm(state.memory) == pytest.approx(math.sqrt(payload.error), rel=8 * U)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_memory_adds_up(backend, codec, decay):
    state = codec.new_state(N)
    sent, went_in, slack = np.zeros(N), np.zeros(N), 0.0
    for step in range(40):
        x = random(N, step)
        before = state.memory.copy()
        decoded = codec.decode(codec.encode(x, state=state, decay=decay))
        went_in += x - (1 - decay) * before.astype(np.float64)
        sent += decoded
        # A sum and a difference of float32, and one decoding against another (rank + 2 terms).
        slack += 3 * U * (norm(x) + norm(before)) + 8 * U * norm(decoded)
    assert norm(sent + state.memory - went_in) <= slack
    np.testing.assert_array_equal(codec.state_to_values(state, N), state.memory)
    again = codec.values_to_state(state.memory)
    np.testing.assert_array_equal(again.memory, state.memory)


def drifting(steps: int) -> list[np.ndarray]:
    """Singular values that fall slowly, so that one power iteration finds little, and factors
    that turn by a few degrees a step."""
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((40, 40)), rng.standard_normal((60, 40))
    values = 0.85 ** np.arange(40)
    found = []
    for _ in range(steps):
        left += 0.03 * rng.standard_normal(left.shape)
        right += 0.03 * rng.standard_normal(right.shape)
        u, v = np.linalg.qr(left)[0], np.linalg.qr(right)[0]
        found.append((u * values @ v.T).astype(np.float32).reshape(-1))
    return found


def test_a_warm_start_is_better_on_a_drifting_matrix(backend):
    """With PowerSGD's one iteration and no more, so that the start matters."""
    codec = LowRankCodec(shape=(40, 60), rank=4, bits=16, rounds=0)
    state = codec.new_state(N)
    warm, cold, best = [], [], []
    for x in drifting(25):
        state.memory[:] = 0  # the start alone
        warm.append(codec.encode(x, state=state).error)
        cold.append(codec.encode(x).error)
        best.append(np.square(np.linalg.svd(x.reshape(40, 60))[1][4:].astype(np.float64)).sum())
    assert (np.array(warm)[5:] < np.array(cold)[5:]).all()
    assert sum(warm[5:]) < 1.02 * sum(best[5:])
    assert all(w >= b * (1 - 1e-4) for w, b in zip(warm, best, strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_is_all_nan_and_leaves_the_state(backend, codec, bad):
    state = codec.new_state(N)
    codec.encode(random(N), state=state)
    before = copy.deepcopy(state)
    x = random(N, 1)
    x[1234] = bad
    payload = codec.encode(x, state=state)
    assert np.isnan(codec.decode(payload)).all()
    assert payload.nbytes == codec.payload_bytes(N)
    np.testing.assert_array_equal(state.memory, before.memory)
    np.testing.assert_array_equal(state.start, before.start)
    mean = codec.decode_mean([codec.encode(random(N)), payload])
    assert np.isnan(mean).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_decode_mean_is_the_mean(backend, codec, ranks):
    payloads = [codec.encode(random(N, seed)) for seed in range(ranks)]
    decodes = [codec.decode(p).astype(np.float64) for p in payloads]
    mean = codec.decode_mean(payloads)
    assert mean.dtype == np.float32
    # Each sum rounds what it has so far, at most the sum of norms; the quotient once more; the
    # second stage is weighted and added.
    bound = (ranks + 4) * U * sum(2 * norm(d) for d in decodes) / ranks
    assert norm(mean - sum(decodes) / ranks) <= bound
    np.testing.assert_array_equal(codec.decode_mean(payloads).view(np.uint32), mean.view(np.uint32))
    if ranks == 1:
        np.testing.assert_array_equal(mean, codec.decode(payloads[0]))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_size_is_fixed_and_counted_by_hand(backend, codec):
    inputs = [random(N), np.zeros(N, np.float32), np.full(N, np.nan, np.float32)]
    sizes = {codec.encode(x).nbytes for x in inputs}
    rows, columns = cut(codec.shape)
    total = 0
    for size in (rows, columns):  # a record a column: a range of 16 bits, and the codes
        total += codec.rank * math.ceil((16 + size * codec.bits) / 32) * 4
    if codec.rest:
        total += codec.rest.payload_bytes(N) - 32
    assert sizes == {32 + math.ceil(total / 16) * 16} == {codec.payload_bytes(N)}
    with pytest.raises(CompressError, match="2399 elements do not fill shape"):
        codec.encode(random(N - 1))


@pytest.mark.parametrize(("settings", "message"), [
    ({"shape": (10, 0)}, "expected sizes above zero"),
    ({"shape": (10, 5), "rank": 6}, "a rank from 1 to 5"),
    ({"shape": (10, 5), "rank": 0}, "a rank from 1 to 5"),
    ({"shape": (10,), "rank": 2}, "a rank from 1 to 1"),
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


def test_directions_of_another_library():
    torch = pytest.importorskip("torch")
    matrix, start = low_rank(40, 60, 4).reshape(40, 60), first_factor(60, 4)
    own = directions(matrix, start, 2)
    other = directions(torch.from_numpy(matrix), torch.from_numpy(start), 2)
    assert isinstance(other, torch.Tensor)
    # Both span the same four dimensions; signs are the library's matter.
    assert norm(own @ own.T - (other @ other.T).numpy()) <= 40 * 60 * U


def test_a_kernel_of_keras_is_caught_by_as_many_directions_as_its_matrix_has():
    """Rows of the old cut were 3: a matrix of rank 4 in the new one it could not hold."""
    rng = np.random.default_rng(3)
    true = rng.standard_normal((3 * 3 * 16, 4)) @ rng.standard_normal((4, 24))
    kernel = true.astype(np.float32).reshape(3, 3, 16, 24)
    codec = LowRankCodec(shape=kernel.shape, rank=4, bits=16)
    x = kernel.reshape(-1)
    error = np.linalg.norm(codec.decode(codec.encode(x)) - x) / np.linalg.norm(x)
    # P and Q in half precision: 2**-11 each, and the ridge of the fit, sqrt(1e-6).
    assert error < 3e-3
