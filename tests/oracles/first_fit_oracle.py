"""What csrc/memory/pool_greedy.cpp does, in NumPy: first fit in a given order."""

from __future__ import annotations

import numpy as np

from sn_memory.pool.problem import Ints, Problem


def first_fit(problem: Problem, order: Ints) -> Ints:
    """Return what `sn_memory.pool.pack.first_fit` returns."""
    offsets = np.zeros(len(problem), np.int64)
    # What is placed so far, in order of placing: first, last, offset, end.
    done = np.zeros((4, len(problem)), np.int64)
    for count, i in enumerate(order.tolist()):
        first, last, offset, end = done[:, :count]
        there = np.flatnonzero((first < problem.last[i]) & (problem.first[i] < last))
        there = there[np.argsort(offset[there], kind="stable")]
        tops = np.concatenate([[0], np.maximum.accumulate(end[there])])
        tops += -tops % problem.align[i]
        fits = np.append(offset[there] - tops[:-1] >= problem.size[i], True)
        offsets[i] = tops[fits.argmax()]
        done[:, count] = (
            problem.first[i],
            problem.last[i],
            offsets[i],
            offsets[i] + problem.size[i],
        )
    return offsets
