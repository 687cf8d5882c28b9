"""A step of a model with its state on the host, run once on the sample with nothing updated.

The trial of `plan` runs the model's own step beside the planned one, with all parameters on the
device; what does not fit there cannot be tried so. Here the planned step runs alone, to see whether
kernels lay results out otherwise than traced, and whether it runs at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..eager.replay import Replay
from ..errors import ReplayError, TraceError, first_line
from ..model.results import ends_of, tensors_of
from ..model.step import apart, restore_rng_state, tensors
from ..trace.record import Layouts

_ROUNDS = 8


def rehearsed(
    replay: Replay,
    model: torch.nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    planned_with: Callable[[Layouts], Replay],
) -> Replay:
    """Return a step that runs on a sample as traced; traced again where kernels lay out otherwise.

    Parameters
    ----------
    replay
        The step.
    model, given
        The plain model, and the sample; one without memory is not run.
    planned_with
        Traces and plans the step with such layouts.

    Raises
    ------
    TraceError
        If the step does not run on the sample.
    """
    if any(it.is_meta or isinstance(it, FakeTensor) for it in (*tensors(given), *model.buffers())):
        return replay
    seen: Layouts = {}
    for _ in range(_ROUNDS):
        new: Layouts = {}
        try:
            _run(replay, model, given, new)
        except ReplayError:
            # A kernel that cannot go on with what was laid out for it has said what it wants.
            if not new:
                raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise TraceError(
                f"a step with the plan, tried on the sample, failed: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        if not new.keys() - seen.keys():
            return replay
        seen = {**seen, **new}
        replay = planned_with(seen)
    return replay


def _run(replay: Replay, model: torch.nn.Module, given: Any, layouts: Layouts) -> None:
    added = replay.added
    assert added is not None
    args, kwargs = apart(given)
    buffers = [(it, it.detach().clone()) for it in model.buffers()]
    replay.layouts = layouts
    try:
        with restore_rng_state(), added.without_updates(), torch.enable_grad():
            returned = replay.run(model, args, kwargs)
            ends = ends_of(returned, tensors_of(returned, model))
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(it) for it in ends])
    finally:
        replay.layouts = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
            for leaf in tensors((args, kwargs)):
                leaf.grad = None
