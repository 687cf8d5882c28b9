"""Two runs of a step: their results and variables, and how far apart they are.

What is zero but for rounding differs by all of itself when sums are taken in another order: the
gradient of a bias before batch norm does. So a difference is not held against its own tensor's
largest value where that value itself is rounding; what rounding does is measured, by a run with
the last bit of the weights turned over at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import tensorflow as tf

from .model import put_back

Results = dict[str, Any]
# The part of a tensor's largest value that may be rounding before the tensor counts as rounding.
_ROUNDING_SHARE: Final = 0.1
# A difference of up to so many times what the last bit of the weights does is rounding, too: deep
# networks on few values multiply it, ResNet50 on 64 pixels to a tenth of a gradient.
_LIKE_ROUNDING: Final = 8
# Differences of so many last bits need no second look.
_FEW: Final = 16
_UNITS: Final = {
    tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52,
}  # fmt: skip


def results_of(run: Callable[[], Any], variables: Sequence[Any]) -> Results:
    """Run once from the present state; return results and variables, and put the latter back."""
    with put_back(variables):
        flat = tf.nest.flatten(run(), expand_composites=True)
        results = {
            f"result {place}": np.asarray(value)
            for place, value in enumerate(flat)
            if value is not None
        }
        return results | {
            f"{variable.name} #{place}": variable.numpy()
            for place, variable in enumerate(variables)
        }


def different(expected: Results, got: Results) -> tuple[str, ...]:
    """Return the names of what is not bit-equal."""
    names = expected.keys() | got.keys()
    return tuple(sorted(name for name in names if not _same(expected.get(name), got.get(name))))


def relative_error(
    expected: Results, got: Results, nudged: Callable[[], Results], unit: float
) -> float:
    """Return the largest difference, relative to the largest value of its tensor.

    A tensor that differs by no more than a few times what the last bit of the weights does to it
    counts by how many such bits that is, times `unit`. One that is zero but for rounding and
    differs by more is taken relative to the largest value of all results, or of all variables.

    Parameters
    ----------
    nudged
        Returns the results with weights that differ in their last bit. Called where it matters.
    unit
        Relative difference of that last bit.
    """
    names = different(expected, got)
    if not names:
        return 0.0
    pairs = {name: (expected.get(name), got.get(name)) for name in names}
    if any(
        one is None or other is None or one.shape != other.shape for one, other in pairs.values()
    ):
        return float("inf")
    gaps = {name: _gap(*pair) for name, pair in pairs.items()}
    errors = {name: gap / (_largest(expected[name]) or 1.0) for name, gap in gaps.items()}
    if max(errors.values()) < _FEW * unit:
        return max(errors.values())
    other = nudged()
    for name in names:
        rounding = _gap(expected[name], other[name])
        if gaps[name] <= _LIKE_ROUNDING * rounding:
            errors[name] = unit * gaps[name] / rounding
        elif rounding > _ROUNDING_SHARE * _largest(expected[name]):
            peers = [it for key, it in expected.items() if _is_result(key) == _is_result(name)]
            errors[name] = gaps[name] / (max(map(_largest, peers)) or 1.0)
    return max(errors.values())


@contextmanager
def nudged(variables: Sequence[Any], unit: float) -> Iterator[None]:
    """Change variables by a relative `unit` up or down, at random; they are put back."""
    generator = np.random.default_rng(0)
    with put_back(variables):
        for variable in variables:
            value = variable.numpy()
            if tf.as_dtype(variable.dtype).is_floating:
                signs = generator.choice(np.array([-1.0, 1.0]), value.shape)
                wide = value.astype(np.float64) * (1 + unit * signs)
                variable.assign(wide.astype(value.dtype))
        yield


def unit_of(dtypes: Iterable[Any]) -> float:
    """Return the step of the least exact among floating types, relative to a value."""
    return max((_UNITS[it] for it in map(tf.as_dtype, dtypes) if it in _UNITS), default=2.0**-23)


def _is_result(name: str) -> bool:
    return name.startswith("result ")


def _same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool(one.tobytes() == other.tobytes())


def _wide(value: Any) -> Any:
    """Return numbers as float64; of text, nothing that could be measured."""
    return value.astype(np.float64) if value.dtype.kind not in "OSU" else np.full(1, np.nan)


def _largest(value: Any) -> float:
    return float(np.abs(np.nan_to_num(_wide(value))).max()) if value.size else 0.0


def _gap(one: Any, other: Any) -> float:
    """Return the largest difference; what is a number in one run only is infinitely far off."""
    if one.tobytes() == other.tobytes():
        return 0.0
    left, right = _wide(one), _wide(other)
    alike = (left == right) | (np.isnan(left) & np.isnan(right) & (one.dtype.kind not in "OSU"))
    return float(np.nan_to_num(np.where(alike, 0.0, np.abs(left - right)), nan=np.inf).max())
