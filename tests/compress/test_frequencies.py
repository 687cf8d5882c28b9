"""Directions of frequencies: against a naive form, on ranks of NumPy and torch in one process."""

import math

import numpy as np
import pytest
from bucket_ranks import LIBRARIES, Ranks, bits, chance
from scipy.fft import dctn, idctn
from sessions import dense, exchange_all, sessions_of

from sn_compress import AutoCompression, LowRankCompression
from sn_compress.allreduce.allocate import Allocation, EnergyCurve, with_frequencies, words_of
from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import HEAD
from sn_compress.allreduce.methods.frequencies import Frequencies, kernels_of, waves
from sn_compress.errors import CompressError

TORCH, KERAS, ROW, ONE = (8, 6, 3, 3), (3, 3, 6, 8), (10, 4, 5), (5, 1, 2, 2)
SHAPES = [TORCH, KERAS, ROW, ONE]


def part_of(*shapes, size=4):
    return Frequencies([kernels_of(shape) for shape in shapes], [size] * len(shapes))


def spectrum(values, shape):
    """[frequencies, across, beside] float64, by SciPy."""
    values = np.asarray(values, np.float64).reshape(shape)
    if kernels_of(shape).last:
        found = dctn(values, axes=range(2, len(shape)), norm="ortho")
        return np.moveaxis(found.reshape(*shape[:2], -1), -1, 0)
    found = dctn(values, axes=range(len(shape) - 2), norm="ortho")
    return found.reshape(-1, *shape[-2:]).swapaxes(1, 2)


def values_of(cube, shape):
    """The way back, [n]."""
    if kernels_of(shape).last:
        found = np.moveaxis(cube, 0, -1).reshape(shape)
        return idctn(found, axes=range(2, len(shape)), norm="ortho").reshape(-1)
    found = cube.swapaxes(1, 2).reshape(shape)
    return idctn(found, axes=range(len(shape) - 2), norm="ortho").reshape(-1)


def test_kernels_are_found_at_either_end_and_waves_are_those_of_scipy():
    assert [kernels_of(shape).sides for shape in SHAPES] == [(3, 3), (3, 3), (5,), (2, 2)]
    assert [kernels_of(shape).shape for shape in SHAPES] == [(8, 54), (54, 8), (10, 20), (5, 4)]
    for none in ((64, 64), (7,), (8, 8, 1, 1), (64, 64, 9, 9), (0, 2, 3, 3)):
        assert kernels_of(none) is None
    for sides in ((3, 3), (2, 5), (7,), (2, 2, 3)):
        count = math.prod(sides)
        expected = dctn(
            np.eye(count).reshape(count, *sides), axes=range(1, len(sides) + 1), norm="ortho"
        )
        # Multiples of 2**-22.
        assert np.abs(waves(sides).host - expected.reshape(count, count).T).max() <= 2.0**-23


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_sent_is_of_few_directions_and_is_what_the_memories_lose(shape):
    rng, ranks, size = np.random.default_rng(1), 3, 4
    group = Ranks([part_of(shape, size=size)], ranks)
    group.begin([chance(rng, 1, [shape])[0][0]])
    for _ in range(6):
        gradients = chance(rng, ranks, [shape])
        pairs = zip(group.memories, gradients, strict=True)
        held = [np.ravel(memory[0]) + np.ravel(own[0]) for memory, own in pairs]
        results = group.step(gradients)
        assert (np.asarray(results[0].state["0.age"]) == 1).sum() == size
        mean = np.asarray(results[0].mean[0], np.float64).reshape(-1)
        # Each direction is one of a frequency.
        waves = [np.linalg.svd(wave, compute_uv=False) for wave in spectrum(mean, shape)]
        assert 0 < (np.concatenate(waves) > 1e-5 * np.linalg.norm(mean)).sum() <= size
        lefts = [np.ravel(own.residuals[0]).astype(np.float64) for own in results.values()]
        error = np.mean(held, axis=0) - mean - np.mean(lefts, axis=0)
        assert np.abs(error).max() <= 1e-5 * np.abs(held).max()
        for before, left, own in zip(held, lefts, results.values(), strict=True):
            gone = np.square(before.astype(np.float64)).sum() - np.square(left).sum()
            # Waves are rounded to 2**-22, and all numbers to float32.
            assert abs(float(own.sent) - gone) <= 1e-5 * np.square(before).sum()


def test_what_lies_in_one_frequency_is_sent_at_once_and_what_was_silent_is_not_forgotten():
    rng = np.random.default_rng(2)
    loud = np.zeros((9, 8, 6))
    loud[4] = np.outer(rng.standard_normal(8), rng.standard_normal(6))
    loud = values_of(loud, TORCH).astype(np.float32)
    group = Ranks([part_of(TORCH, size=2)], 2, LIBRARIES[:1])
    group.begin([loud])
    results = group.step([[loud]] * 2)
    # 63 levels of a rank on each side of a scale at most 2**2.5 above the largest number.
    near = np.linalg.norm(np.asarray(results[0].mean[0]).reshape(-1) - loud)
    assert near < 0.25 * np.linalg.norm(loud)
    for _ in range(80):
        group.step([[loud]] * 2)
    assert np.asarray(group.states[0]["0.age"]).max() < 80


def test_keras_sends_what_torch_does():
    rng = np.random.default_rng(6)
    groups = [Ranks([part_of(shape)], 2) for shape in (TORCH, KERAS)]
    for _ in range(5):
        own = chance(rng, 2, [TORCH])
        turned = [[mine[0].transpose(2, 3, 1, 0)] for mine in own]
        first, second = (g.step(each)[0] for g, each in zip(groups, (own, turned), strict=True))
        back = np.asarray(second.mean[0]).reshape(KERAS).transpose(3, 2, 0, 1).reshape(8, 54)
        # A number that lies between two digits may be rounded to the other one.
        assert np.linalg.norm(back - first.mean[0]) <= 0.1 * np.linalg.norm(first.mean[0])


def test_beginning_finds_the_loudest():
    rng = np.random.default_rng(7)
    for shape in (TORCH, KERAS):
        mean, part = chance(rng, 1, [shape])[0][0], part_of(shape)
        sigma = np.linalg.svd(spectrum(mean, shape), compute_uv=False)
        state = part.begin(part.new_state(mean), [mean.reshape(part.shapes[0])])
        # All directions of a frequency together have all its energy, in some order.
        energy = np.square(state["spread"].reshape(sigma.shape)).sum(axis=1)
        assert np.abs(energy / np.square(sigma).sum(axis=1) - 1).max() < 0.01


def test_the_words_are_few():
    """A byte for each number of a direction, and for both factors of a tensor one scale."""
    for size in (0, 9 * 6 + 1):
        with pytest.raises(CompressError, match="expected 1 to 54"):
            part_of(TORCH, size=size)
    part = Frequencies([kernels_of((64, 32, 3, 3)), kernels_of((3, 3, 16, 16))], [5, 2])
    expected = [HEAD + 2 + (5 * 64 + 2 * 16) // 4, HEAD + 2 + (5 * 32 + 2 * 16) // 4]
    assert Bucket([part]).words(8) == expected
    size = Allocation((64, 32, 3, 3), 5, "frequencies")
    assert Bucket([size.part()]).words(8) == words_of(size.shape, 5, 8, "frequencies")


def smooth(rng, shape):
    """Kernels that are nearly alike in all their numbers: energy in few frequencies."""
    cube = rng.standard_normal((9, shape[0], shape[1])) * 8.0 ** -np.arange(9)[:, None, None]
    return values_of(cube, shape).astype(np.float32)


def test_frequencies_are_taken_where_they_catch_more():
    rng, shape = np.random.default_rng(8), (32, 32, 3, 3)
    for make, way in ((smooth, "frequencies"), (thin, "low_rank")):
        mean = make(rng, shape)
        low_rank, frequencies = EnergyCurve.of(mean, shape), EnergyCurve.of_frequencies(mean, shape)
        sigma = np.sort(np.linalg.svd(spectrum(mean, shape), compute_uv=False).reshape(-1))[::-1]
        shares = np.square(sigma[:256]) / np.square(mean, dtype=np.float64).sum()
        np.testing.assert_allclose(frequencies.shares, shares, atol=1e-5)
        assert with_frequencies(low_rank, frequencies, mean.size / 20, 8).method == way
    assert EnergyCurve.of_frequencies(mean.reshape(-1), (288, 32)) is None


def thin(rng, shape):
    """Rank one, in all frequencies."""
    left, right = rng.standard_normal(shape[0]), rng.standard_normal(math.prod(shape[1:]))
    return np.outer(left, right).astype(np.float32).reshape(-1)


SESSION = {"smooth": (32, 32, 3, 3), "thin": (32, 16, 3, 3)}


def exchanged(sessions, gradients):
    return exchange_all(sessions, list(SESSION), gradients)[0][0]


def drawn(rng, ranks):
    makes = {"smooth": smooth, "thin": thin}
    return [{n: makes[n](rng, shape) for n, shape in SESSION.items()} for _ in range(ranks)]


def begun(rng, ranks, frequencies=True):
    sessions = sessions_of(ranks, frequencies=frequencies)
    sent = drawn(rng, 1)[0]
    for name, shape in SESSION.items():
        assert all(own.dense(name, shape) for own in sessions)
        dense(sessions, name, [sent[name]] * ranks)
    for own in sessions:
        own.commit()
    return sessions


def test_a_session_chooses_and_saves_and_goes_on_bit_by_bit():
    rng = np.random.default_rng(11)
    sessions = begun(rng, 2)
    for _ in range(3):
        exchanged(sessions, drawn(rng, 2))
    ways = {name: sessions[1].method(name) for name in SESSION}
    assert ways == {"smooth": "frequencies", "thin": "low_rank"}
    plain = begun(rng, 2, frequencies=False)
    exchanged(plain, drawn(rng, 2))
    assert {plain[0].method(name) for name in SESSION} == {"low_rank"}
    resumed = sessions_of(2, frequencies=True)
    for own, other in zip(resumed, sessions, strict=True):
        own.load_state_dict(other.state_dict())
    for turn in range(3):
        gradients = drawn(rng, 2)
        both = [exchanged(each, gradients) for each in (sessions, resumed)]
        if turn == 1:  # taken back, the step is made again with the same bits
            for own in resumed:
                own.undo()
            both.append(exchanged(resumed, gradients))
        assert len({tuple(map(bits, each)) for each in both}) == 1
        for own in (*sessions, *resumed):
            own.commit()
    # Another number of ranks goes on with what these shared, and the mean of what they owe.
    mean = {n: np.mean([own.residual(n) for own in sessions], axis=0) for n in SESSION}
    three = sessions_of(3, frequencies=True)
    for own in three:
        own.load_with_residuals(sessions[0].state_dict(), mean)
    exchanged(three, drawn(rng, 3))
    # Of another method, of one for which it is too large, or of another shape.
    wrong = [{"way": way} for way in ("frequency", "rowz")] + [{"way": "rows", "size": 3000}]
    for entry in (*wrong, {"size": 9 * 32 + 1}, {"sides": [32, 32, 3, 4]}):
        state = sessions[0].state_dict()
        state["tensors"]["smooth"].update(entry)
        with pytest.raises(CompressError):
            sessions_of(1)[0].load_state_dict(state)


def test_auto_compression_has_frequencies_and_low_rank_has_not():
    assert AutoCompression.settings.shared["frequencies"]
    assert not LowRankCompression.settings.shared["frequencies"]
