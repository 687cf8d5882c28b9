"""Buckets: the same bits in every library, nothing read on the way, and no step half done."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sn_compress.arrays import steady
from sn_compress.sums.bucket import Bucket
from sn_compress.sums.low_rank import LowRank
from sn_compress.sums.rows import Rows
from sn_compress.sums.whole import Whole

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}


def bucket():
    return Bucket(
        [
            LowRank([(24, 15), (40, 30), (24, 15), (9, 70)], [2, 5, 3, 1]),
            Whole([(1, 64), (1, 64), (7, 9)]),
            Rows([(50, 4)], [3]),
        ]
    )


def all_reduced(generators, damage=None):
    """Drive ranks of either library as an all-reduce would; what they return."""
    words, ends, number = [next(each) for each in generators], [], 0
    while not ends:
        total = np.sum([np.asarray(each) for each in words], axis=0, dtype=np.int32)
        following = []
        for rank, (generator, own) in enumerate(zip(generators, words, strict=True)):
            mine = total.copy()
            if damage == (rank, number):
                mine[-1] ^= 1 << 9
            try:
                make = LIBRARIES["numpy" if isinstance(own, np.ndarray) else "torch"]
                following.append(generator.send(make(mine)))
            except StopIteration as end:
                ends.append(end.value)
        words, number = following, number + 1
    return ends


def drawn(rng, shapes, common):
    return [
        (mean + 0.5 * rng.standard_normal(shape)).astype(np.float32)
        for mean, shape in zip(common, shapes, strict=True)
    ]


def bits(array):
    return np.asarray(array).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_of_two_libraries_share_every_bit(ranks):
    """Rank 0 computes in NumPy, the others in torch; each adds its own gradients."""
    parts, rng = bucket(), np.random.default_rng(ranks)
    common = [rng.standard_normal(shape) for shape in parts.shapes]
    makes = [LIBRARIES["torch" if rank else "numpy"] for rank in range(ranks)]
    first = [it.astype(np.float32) for it in common]
    states = []
    for make in makes:
        like = [make(it.copy()) for it in first]
        states.append(parts.begin(parts.new_state(like[0]), like))
    owed = [[np.zeros(shape, np.float32) for shape in parts.shapes] for _ in range(ranks)]
    for _ in range(50):
        gradients = [drawn(rng, parts.shapes, common) for _ in range(ranks)]
        held = [
            [make(g + left) for g, left in zip(own, last, strict=True)]
            for make, own, last in zip(makes, gradients, owed, strict=True)
        ]
        ends = all_reduced(
            [
                parts.step(state, own, ranks=ranks, rank=rank, exact=True)
                for rank, (state, own) in enumerate(zip(states, held, strict=True))
            ]
        )
        for end in ends[1:]:
            for one, other in zip(ends[0].mean, end.mean, strict=True):
                np.testing.assert_array_equal(bits(one), bits(other))
            for name, value in ends[0].state.items():
                np.testing.assert_array_equal(bits(value), bits(end.state[name]), name)
        assert not ends[0].lost
        states = [end.state for end in ends]
        owed = [[np.asarray(it) for it in end.left] for end in ends]


@pytest.mark.parametrize("exact", [False, True])
def test_no_part_reads_a_value(exact):
    """Tensors of device `meta` have none."""
    parts = bucket()
    matrices = [torch.zeros(shape, device="meta") for shape in parts.shapes]
    state = parts.rescale(parts.begin(parts.new_state(matrices[0]), matrices), 3)
    steps = parts.step(state, matrices, ranks=3, rank=1, exact=exact)
    sent = [next(steps)]
    sent.append(steps.send(sent[0]))
    with pytest.raises(StopIteration) as end:
        steps.send(sent[1])
    assert [words.shape[0] for words in sent] == parts.words(3)
    assert all(words.dtype == torch.int32 for words in sent)
    result = end.value.value
    for arrays in (result.mean, result.left, [result.lost, result.damaged, result.sent]):
        assert all(it.device.type == "meta" for it in arrays)
    assert [tuple(it.shape) for it in result.mean] == parts.shapes
    assert {name: (it.shape, it.dtype) for name, it in result.state.items()} == {
        name: (it.shape, it.dtype) for name, it in state.items()
    }


def test_each_round_of_low_rank_is_one_graph():
    part = LowRank([(12, 9), (12, 9), (6, 20)], [2, 1, 3])
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(1))
                for shape in part.shapes]  # fmt: skip
    state = part.begin(part.new_state(matrices[0]), matrices)

    class Found:
        def __init__(self, words):
            self.words, self.poison = words, torch.ones(())

    def rounds(state, matrices, totals):
        own = [it.clone() for it in matrices]
        first, finite = part.first(state, own, 2)
        second, also, seen = part.second(state, own, Found(totals[0]), 2)
        end = part.last(state, own, seen, Found(totals[1]), 2, exact=False, outs=None)
        return first, finite, second, also, end.left, end.mean, end.state, end.sent

    with steady(matrices[0]):
        zeros = [torch.zeros(words, dtype=torch.int32) for words in part.words(2)]
        totals = [2 * rounds(state, matrices, zeros)[0]]
        totals.append(2 * rounds(state, matrices, [totals[0], zeros[1]])[2])
        expected = rounds(state, matrices, totals)
    captured = torch.compile(rounds, fullgraph=True, backend="aot_eager")
    found = captured(state, matrices, totals)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Launches(TorchDispatchMode):
    """Counts operations that are more than a view."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def resnet50():
    """The matrices of its convolutions and its last layer, in order."""
    shapes, inner = [(64, 147)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inner), (width, 9 * width), (4 * width, width)]
            if not block:
                shapes.append((4 * width, inner))
            inner = 4 * width
    return [*shapes, (1000, 2048)]


def test_a_step_of_resnet50_is_few_launches():
    shapes = resnet50()
    assert len(shapes) == 54
    norms = [(1, 64)] * 14 + [(1, 128)] * 16 + [(1, 256)] * 32 + [(1, 512)] * 24 + [(1, 2048)] * 8
    parts = Bucket([LowRank(shapes, [4 + at % 5 for at in range(54)]), Whole(norms)])
    matrices = [torch.zeros(shape, device="meta") for shape in parts.shapes]
    state = parts.new_state(matrices[0])

    def step():
        outs = [torch.empty_like(it) for it in matrices]
        with Launches() as launched:
            steps = parts.step(state, matrices, ranks=8, rank=0, outs=outs)
            steps.send(steps.send(next(steps))) if False else None
            words = next(steps)
            words = steps.send(words)
            with pytest.raises(StopIteration):
                steps.send(words)
        return launched.count

    step()  # makes what follows from shapes
    assert step() < 600
