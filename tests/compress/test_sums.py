"""Buckets: the same bits in every library, nothing read on the way, and no step half done."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from bucket_ranks import new_state
from rounds import drive_one
from torch.utils._python_dispatch import TorchDispatchMode

from sn_compress import _native
from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import StepOptions
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.arrays import full_fp32_matmul
from sn_compress.collective import Buckets
from sn_compress.ops.products import cut
from sn_compress.prediction.cost import layers

ROOT = Path(__file__).resolve().parents[2]


def test_each_round_of_low_rank_is_one_graph(monkeypatch):
    part = LowRank([(12, 9), (12, 9), (6, 20)], [2, 1, 3])
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(1))
                for shape in part.shapes]  # fmt: skip
    state = part.begin(part.new_state(matrices[0]), matrices)

    class Found:
        def __init__(self, words):
            self.words, self.poison = words, torch.ones(())

    def rounds(state, matrices, totals):
        own = [it.clone() for it in matrices]
        step = part.step(state, own, StepOptions(2, None))
        first, second = next(step), step.send(Found(totals[0]))
        try:
            step.send(Found(totals[1]))
        except StopIteration as ended:
            end = ended.value
        sent = first.words, first.finite, second.words, second.finite
        return *sent, end.residuals, end.mean, end.state, end.sent

    with full_fp32_matmul(matrices[0]), monkeypatch.context() as patch:
        patch.setattr(_native, "core", lambda: None)  # what is captured is the array form
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


def test_a_step_of_resnet50_is_few_launches():
    """Of each bucket that its matrices travel in: its vectors travel plain."""
    shapes = [cut(it.shape) for it in layers("resnet50") if len(it.shape) > 1]
    assert len(shapes) == 54
    layout = Buckets((str(at), rows * columns, None) for at, (rows, columns) in enumerate(shapes))
    counts = [launches([shapes[int(at)] for at in names]) for names in layout.members]
    assert len(counts) == 3
    assert max(counts) < 600
    # All in one: four products a matrix are 216, 8 directions made orthonormal twice about 100.
    assert launches(shapes) < 600


def launches(shapes):
    """Of a step of a bucket of matrices, on a device."""
    parts = Bucket([LowRank(shapes, [4 + at % 5 for at in range(len(shapes))])])
    matrices = [torch.zeros(shape, device="meta") for shape in parts.shapes]
    state = new_state(parts, matrices[0])

    def step():
        outs = [torch.empty_like(it) for it in matrices]
        with Launches() as launched:
            steps = parts.step(state, matrices, StepOptions(8, 0), outs=outs)
            drive_one(steps, lambda _, words: words)
        return launched.count

    step()  # makes what follows from shapes
    return step()


MIX = """
import hashlib, numpy as np
from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import StepOptions
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.allreduce.methods.dense import Dense

parts = Bucket([LowRank([(200, 301), (64, 500)], [6, 9]), Dense([(3, 70)])])
rng = np.random.default_rng(0)
mean = [rng.standard_normal(shape).astype(np.float32) for shape in parts.shapes]
by_part = zip(parts.parts, parts._by_part(mean))
state = parts._named(one.begin(one.new_state(own[0]), own) for one, own in by_part)
told = hashlib.sha256()
for step in range(5):
    # Words that all ranks would get: of digits that do not hang on this machine's products.
    steps = parts.step(state, [it.copy() for it in mean], StepOptions(3, 0, exact=True))
    words = next(steps)
    while True:
        total = rng.integers(-99, 99, words.size).astype(np.int32)
        total[:2] = 0
        try:
            words = steps.send(total)
        except StopIteration as end:
            state, means = end.value.state, end.value.mean
            break
    for value in (*state.values(), *means):
        told.update(value.tobytes())
print(told.hexdigest())
"""


def test_processors_and_threads_do_not_show_in_what_ranks_share():
    """OpenBLAS with the kernels of other processors, and more threads, is fed the same sums."""
    told = {}
    for kernels, threads in (("Haswell", "1"), ("Sandybridge", "2")):
        mixed = {"OPENBLAS_CORETYPE": kernels, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", MIX],
            env=os.environ | mixed | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        told[kernels, threads] = done.stdout
    assert len(set(told.values())) == 1, told
