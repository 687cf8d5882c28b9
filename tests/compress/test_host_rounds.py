"""Whole rounds of low rank by the extension: the bits of the rounds that are put together."""

import numpy as np
import pytest
import torch

from sn_compress import PayloadError
from sn_compress.devices import _native
from sn_compress.ops.words.word_sum import word_sum
from sn_compress.sums import summable
from sn_compress.sums.host_rounds import rounds_for
from sn_compress.sums.parts.low_rank import LowRank
from sn_compress.sums.summable import Summable, exchange

SHAPES = [(10, 128), (33, 300), (64, 31), (7, 5), (1, 1)]
SIZES = [10, 8, 31, 1, 1]

pytestmark = pytest.mark.skipif(
    _native.core() is None or _native.core().product_kernels() < 2, reason="no compiled kernels"
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(rng, step, ranks):
    """Of steps that a rank has no numbers in, or nothing but zeros, or too large ones."""
    made = [
        [(rng.standard_normal(a * b) * 10.0 ** rng.integers(-6, 6)).astype("f4") for a, b in SHAPES]
        for _ in range(ranks)
    ]
    if step == 2:
        made[-1][2][5] = np.nan
    if step == 3:
        made = [[0 * it for it in own] for own in made]
    if step == 4:
        made[0][1][3:5] = 3e38
    if step == 5:  # of rank 2, fewer than its directions
        for own in made:
            own[1][:] = np.add.outer(np.arange(33), np.arange(300)).reshape(-1)
    return made


def trained(ranks, *, steps=9, damage=None):
    """All that leaves the exchange, and what is kept, in each step."""
    rng = np.random.default_rng(7)
    means = [rng.standard_normal(a * b).astype("f4") for a, b in SHAPES]
    parts = [LowRank([shape], [size]) for shape, size in zip(SHAPES, SIZES, strict=True)]
    each = [
        [Summable.of(part, mean) for part, mean in zip(parts, means, strict=True)]
        for _ in range(ranks)
    ]
    told = []
    for step in range(steps):
        given = gradients(rng, step, ranks)
        started = [
            exchange(
                each[rank], given[rank], ranks=ranks, rank=rank, decay=1 - 0.1 * (step % 2),
                outs=given[rank] if step % 3 else None,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        words = [next(it) for it in started]
        for number in range(2):
            told += words
            total = np.sum(words, axis=0, dtype=np.int64).astype(np.int32)
            if (step, number) == damage:
                total[17] ^= 1
            words = []
            for it in started:
                try:
                    words.append(it.send(total.copy()))
                except StopIteration as end:
                    made, verdict = end.value
                    told += [mean.copy() for mean in made]
                    try:
                        told.append(np.array(verdict.read()[0]))
                    except PayloadError:
                        told.append(np.array(-1))
        for one in [one for own in each for one in own]:
            one.conclude()
            told += [one.memory.copy(), *(np.array(it) for it in one.state.values())]
    return told


@pytest.mark.parametrize(
    ("ranks", "steps", "damage"),
    [(1, 7, None), (3, 7, None), (3, 8, (6, 0)), (3, 8, (6, 1)), (45, 3, None)],
)
def test_bits_are_those_of_the_rounds_that_are_put_together(ranks, steps, damage, monkeypatch):
    """With 45 ranks digits take two bytes."""
    taken = []

    def noted(*args, **options):
        taken.append(rounds_for(*args, **options))
        return taken[-1]

    monkeypatch.setattr(summable, "rounds_for", noted)
    ours = trained(ranks, steps=steps, damage=damage)
    assert len(taken) == steps * ranks
    assert None not in taken
    monkeypatch.setattr(summable, "rounds_for", lambda *args, **options: None)
    theirs = trained(ranks, steps=steps, damage=damage)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    assert sum(it.ndim == 0 and it == -1 for it in ours) == (ranks if damage else 0)


def test_what_is_sent_is_what_the_memory_loses():
    rng = np.random.default_rng(0)
    one = Summable.of(LowRank([(40, 60)], [4]), rng.standard_normal(2400).astype("f4"))
    gradient = rng.standard_normal(2400).astype("f4")
    steps = exchange([one], [gradient], ranks=1, rank=0)
    words = steps.send(next(steps))
    assert word_sum(words) == words[1]
    try:
        steps.send(words)
    except StopIteration as end:
        lost, energy, left = end.value[1].read()
    assert not lost
    np.testing.assert_allclose(energy, np.square(gradient, dtype="f8").sum(), rtol=1e-5)
    np.testing.assert_allclose(left, np.square(one.memory, dtype="f8").sum(), rtol=1e-4)
    assert left < 0.9 * energy


def test_they_are_for_one_thread_of_a_host_and_hardware_that_is_alike():
    bucket, _ = summable.bucket_of((LowRank([(40, 60)], [4]),))
    gradient = np.zeros(2400, np.float32)
    assert rounds_for(bucket, [gradient], ranks=2, exact=False) is not None
    assert rounds_for(bucket, [gradient], ranks=2, exact=True) is None
    assert rounds_for(bucket, [torch.zeros(2400)], ranks=2, exact=False) is None
    torch.set_num_threads(2)
    assert rounds_for(bucket, [gradient], ranks=2, exact=False) is None


def test_buffers_that_do_not_belong_together_are_refused():
    host = rounds_for(
        summable.bucket_of((LowRank([(4, 6)], [2]),))[0],
        [np.zeros(24, np.float32)], ranks=2, exact=False,
    )  # fmt: skip
    core, right = _native.core(), np.zeros(24, np.float32)
    basis, scales = np.zeros(12, np.float32), np.zeros(2, np.int32)
    words = np.zeros(host.left_words, np.int32)

    def first(**changed):
        given = {
            "shapes": host.table, "memories": (right,), "gradients": (right,), "outs": (right + 0,),
            "decay": 1.0, "basis": basis, "left": host.left, "exponents": scales,
            "kernel": host.kernel, "words": words,
        }  # fmt: skip
        return core.low_rank_first(*(given | changed).values())

    assert first() == (0.0, True)
    wrong = {
        "shapes": host.table[:, :2].copy(), "memories": (right[:23],), "gradients": (),
        "kernel": 99, "basis": basis[1:], "exponents": scales + 400, "words": words[1:],
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="do not belong together"):
            first(**{name: value})
    for shape in ((4, 6, 5), (4, -6, 2), (4, 6, 0)):
        with pytest.raises(ValueError, match="do not belong together"):
            first(shapes=np.array([shape]))
