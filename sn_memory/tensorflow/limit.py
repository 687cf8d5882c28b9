"""The budget of who names none: what is free where a model is, and what of its step is there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..cost.devices import named
from ..graph.records import Device
from ..run.process import host_budget
from .card import limit_bytes
from .trace.trace import main_device


def limit_budget(
    model: Any, sample: Any, *, optimizer: Any = None, device: Device | str | None = None
) -> int:
    """Return the bytes that a step may hold in this process, variables and input included.

    See `sn_memory.torch.limit`; on a GPU the limit is that of TensorFlow's allocator.
    """
    if isinstance(device, str) and main_device() == "CPU:0":
        return named(device).usable_bytes
    resident = _resident_bytes(model, sample, optimizer)
    if main_device() == "CPU:0":
        return host_budget(resident)
    used = tf.config.experimental.get_memory_info("GPU:0")["current"]
    return int(limit_bytes() - used + resident)


def _resident_bytes(model: Any, sample: Any, optimizer: Any) -> int:
    ours = [*model.variables, *getattr(optimizer, "variables", ())]
    held = {id(it): it for it in ours}.values()
    samples = [it for it in tf.nest.flatten(sample) if isinstance(it, tf.Tensor)]
    return sum(_bytes_of(it) for it in held) + sum(_bytes_of(it) for it in samples)


def _bytes_of(it: Any) -> int:
    size = tf.TensorShape(it.shape).num_elements() or 0
    return int(size) * tf.as_dtype(it.dtype).size
