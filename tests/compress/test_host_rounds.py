"""Whole rounds of low rank by the extension: the bits of the rounds that are put together."""

import math
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from bucket_ranks import new_state
from rounds import all_reduce, drive
from samples import alike

from sn_compress import PayloadError, _native
from sn_compress.allreduce import bucket as bucket_module
from sn_compress.allreduce.bucket import bucket_of
from sn_compress.allreduce.methods.base import StepOptions
from sn_compress.allreduce.methods.dense import Dense
from sn_compress.allreduce.methods.low_rank import LowRank, _Tables
from sn_compress.allreduce.methods.rows import Rows
from sn_compress.allreduce.state import TensorState, exchange

SHAPES = [(10, 128), (33, 300), (64, 31), (7, 5), (1, 1)]
SIZES = [10, 8, 31, 1, 1]
LOW_RANK = (LowRank,) * len(SHAPES)

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


def trained(ranks, *, steps=9, damage=None, methods=LOW_RANK):
    """All that leaves the exchange, and what is kept, in each step."""
    rng = np.random.default_rng(7)
    means = [rng.standard_normal(a * b).astype("f4") for a, b in SHAPES]
    parts = [
        method([shape], *([] if method is Dense else [[size]]))
        for method, shape, size in zip(methods, SHAPES, SIZES, strict=True)
    ]
    tensors = [
        [TensorState.of(part, mean) for part, mean in zip(parts, means, strict=True)]
        for _ in range(ranks)
    ]
    seen = []

    def combine(step, round_, words):
        seen.extend(words)
        return all_reduce(words, (17, 0) if (step, round_) == damage else None)

    for step in range(steps):
        started = [
            exchange(own, values, StepOptions(ranks, rank, 1 - 0.1 * (step % 2)),
                     values if step % 3 else None)
            for rank, (own, values) in enumerate(
                zip(tensors, gradients(rng, step, ranks), strict=True))
        ]  # fmt: skip
        for means_of_rank, status in drive(started, partial(combine, step)):
            seen += [mean.copy() for mean in means_of_rank]
            try:
                seen.append(np.array(status.read()[0]))
            except PayloadError:
                seen.append(np.array(-1))
        for one in chain(*tensors):
            one.conclude()
            seen += [one.memory.copy(), *map(np.array, one.state.values())]
    return seen


@pytest.mark.parametrize(
    ("ranks", "steps", "damage", "methods"),
    [
        (1, 7, None, LOW_RANK),
        (3, 8, (6, 0), LOW_RANK),
        (3, 8, (6, 1), LOW_RANK),
        (3, 8, (6, 1), (Rows, LowRank, LowRank, Dense, LowRank)),
        (45, 3, None, LOW_RANK),
    ],
)
def test_bits_are_those_of_the_rounds_that_are_put_together(
    ranks, steps, damage, methods, monkeypatch
):
    """With 45 ranks digits take two bytes. Beside other methods low rank is compiled, too."""
    taken = []

    def noted(*given):
        taken.append(compiled(*given))
        return taken[-1]

    compiled = LowRank.compiled_step
    monkeypatch.setattr(LowRank, "compiled_step", noted)
    ours = trained(ranks, steps=steps, damage=damage, methods=methods)
    assert len(taken) == steps * ranks
    monkeypatch.setattr(bucket_module, "kernel", lambda core: None)
    theirs = trained(ranks, steps=steps, damage=damage, methods=methods)
    alike(ours, theirs)
    assert sum(it.ndim == 0 and it == -1 for it in ours) == (ranks if damage else 0)


def test_rows_that_are_multiplied_chunk_by_chunk_have_the_same_bits(monkeypatch):
    """Of more than a chunk of 2**18 elements; of so many columns that a chunk has few rows."""
    rng = np.random.default_rng(3)
    parts = [LowRank([shape], [5]) for shape in ((700, 900), (70, 9001), (6, 50_000))]
    means = [rng.standard_normal(math.prod(part.shapes[0])).astype("f4") for part in parts]
    found = []
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(bucket_module, "kernel", lambda core: None)
            tensors = [TensorState.of(*pair) for pair in zip(parts, means, strict=True)]
            words = next(exchange(tensors, means, StepOptions(1, 0)))
            found.append(words.tobytes())
    assert found[0] == found[1]


def test_they_are_for_one_thread_of_a_host_and_hardware_that_is_alike(monkeypatch):
    asked = []

    def noted(self, state, gradients, memories, options, added, outs):
        asked.append(self)
        return self.step(state, [each.reshape(40, 60) for each in gradients], options)

    monkeypatch.setattr(LowRank, "compiled_step", noted)
    bucket, _ = bucket_of((LowRank([(40, 60)], [4]),))
    for library, threads, exact in (
        (np, 1, False),
        (np, 1, True),
        (torch, 1, False),
        (np, 2, False),
    ):
        torch.set_num_threads(threads)
        zeros = [library.zeros(2400, dtype=library.float32)]
        state = new_state(bucket, zeros[0])
        next(bucket.step(state, zeros, StepOptions(2, 0, exact=exact), zeros))
    assert len(asked) == 1


def test_buffers_that_do_not_belong_together_are_refused():
    tables = _Tables(LowRank([(4, 6)], [2]), 2)
    core, right = _native.core(), np.zeros(24, np.float32)
    basis, scales = np.zeros(12, np.float32), np.zeros(2, np.int32)
    words = np.zeros(tables.left_words, np.int32)

    def first(**changed):
        given = {
            "shapes": tables.shapes, "memories": (right,), "gradients": (right,),
            "outs": (right + 0,),
            "decay": 1.0, "basis": basis, "left": tables.left, "exponents": scales,
            "kernel": 1, "words": words,
        }  # fmt: skip
        return core.low_rank_first(*(given | changed).values())

    assert first() == (0.0, True)
    wrong = {
        "shapes": tables.shapes[:, :2].copy(), "memories": (right[:23],), "gradients": (),
        "kernel": 99, "basis": basis[1:], "exponents": scales + 400, "words": words[1:],
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="do not belong together"):
            first(**{name: value})
    for shape in ((4, 6, 5), (4, -6, 2), (4, 6, 0)):
        with pytest.raises(ValueError, match="do not belong together"):
            first(shapes=np.array([shape]))
