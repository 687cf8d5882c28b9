"""What a rank proposes to send of each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..devices.arrays import to_host
from ..ops.words.scales import exponent_of, times_power
from .choose import Curve, Size, allocate, better, budget, with_frequencies
from .tensor import Tensor


def propose(
    tensors: Mapping[str, Tensor],
    left_out: int,
    *,
    ratio: float,
    min_elements: int,
    ranks: int,
    rows: bool,
    frequencies: bool,
) -> None:
    """Sizes for all tensors that have none yet, from what the dense steps showed this rank.

    left_out : elements that travel plain; each tensor pays its part of them
    rows, frequencies : whether a tensor may be sent by rows, or by frequencies of its kernels
    """
    # A copy: where a thread encodes, a hook may add a tensor meanwhile.
    every = dict(tensors)
    new = {name: t for name, t in every.items() if t.summable is None and t.proposed is None}
    for name, tensor in list(new.items()):
        known = None if tensor.mean is None else to_host(tensor.mean)
        if known is not None and not np.isfinite(known).all():
            # A dense step that was lost has shown nothing: all goes on as before.
            tensor.mean, tensor.summable = None, tensor.earlier
            if tensor.summable is not None:
                del new[name]
    curves = {}
    for name, t in list(new.items()):
        n = math.prod(t.shape)
        mean = np.zeros(n, np.float32) if t.mean is None else to_host(t.mean)
        mean = times_power(mean, -exponent_of(mean))  # shares of energy have no unit
        shape = t.shape if n >= min_elements else (n,)
        curves[name] = Curve.of(mean, shape)
        if curves[name].flat:
            continue
        if t.mean is None and t.earlier is not None:
            t.proposed = t.size  # the step that was to show another was aborted
        elif not mean.any():
            t.proposed = Size(shape, 0)  # nothing is known of it: all of it, until there is
        if t.proposed is not None:
            del new[name], curves[name]
            continue
        low_rank = curves[name]
        if rows:
            curves[name] = better(low_rank, Curve.of_rows(mean, shape), n / ratio, ranks)
        if frequencies and curves[name] is low_rank:
            by_frequencies = Curve.of_frequencies(mean, shape)
            curves[name] = with_frequencies(low_rank, by_frequencies, n / ratio, ranks)
    taken, all_taken = (sum(math.prod(t.shape) for t in of.values()) for of in (new, every))
    chosen = allocate(curves, budget(taken, left_out * taken / all_taken, ratio), ranks)
    for name, tensor in new.items():
        curve, size = curves[name], chosen[name]
        tensor.proposed = Size(curve.shape, size, curve.way if size else "low_rank")
