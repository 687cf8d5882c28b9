"""Sums over ranks, and hashes that have to be one, through Horovod where it is initialised."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..agreement import check_same, digest

Floats = NDArray[np.float64]


def _horovod() -> Any:
    """Return horovod.tensorflow where the user has initialised it; it is not imported for this."""
    hvd = sys.modules.get("horovod.tensorflow")
    return hvd if hvd is not None and hvd.is_initialized() and hvd.size() > 1 else None


def sum_over_ranks(values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return arrays summed over ranks, the same bits on each; one message for all of them."""
    hvd = _horovod()
    if hvd is None or not values:
        return list(values)
    flat = tf.constant(np.concatenate([np.ravel(value) for value in values]))
    flat = hvd.allreduce(flat, op=hvd.Sum, name="sn_memory.apoptosis.statistics").numpy()
    parts = np.split(flat, np.cumsum([np.size(value) for value in values])[:-1])
    return [part.reshape(np.shape(value)) for part, value in zip(parts, values, strict=True)]


def stack_over_ranks(values: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Return rows [r x rows, ...] of all ranks; arrays must have as many rows on each."""
    ranks, rank = place()
    if ranks == 1:
        return list(values)
    found = []
    for value in values:
        every = np.zeros((ranks, *value.shape), value.dtype)
        every[rank] = value
        found.append(every)
    summed = sum_over_ranks(found)
    return [every.reshape(-1, *every.shape[2:]) for every in summed]


def place() -> tuple[int, int]:
    """Return how many ranks there are, and which this is."""
    hvd = _horovod()
    return (1, 0) if hvd is None else (hvd.size(), hvd.rank())


def largest_of_ranks(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks."""
    hvd = _horovod()
    if hvd is None:
        return list(values)
    every = hvd.allgather(
        tf.constant([list(values)], tf.float64), name="sn_memory.apoptosis.largest"
    )
    return [float(value) for value in every.numpy().max(axis=0)]


def fingerprint(values: Iterable[Any]) -> str:
    """Return a hash of the bits of variables; empty where there is nobody to compare with."""
    if _horovod() is None:
        return ""
    found = hashlib.sha256()
    for value in values:
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def require_same(what: str, text: str) -> None:
    """Raise AgreementError on every rank unless all gave the same text."""
    mine = digest(text)
    hvd = _horovod()
    if hvd is None:
        return
    sent = tf.constant(np.frombuffer(mine, np.uint8)[None])
    every = hvd.allgather(sent, name="sn_memory.apoptosis.hash").numpy()
    check_same(what, text, [row.tobytes() for row in every])
