"""The device that is planned for: its identity, its allocator's settings, and its limit.

Budgets of plans for a GPU, present or named, limit what TensorFlow's allocator reserves. On a host
they limit live bytes.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf
from tensorflow.python.client import device_lib

from ..cost.bfc import BFCSettings
from ..cost.devices import is_here, named
from ..graph.records import Device
from ..run.reserved import host_budget
from .memory import bytes_of, main_device

# Values of TF_GPU_ALLOCATOR with which the driver serves each request.
_DRIVERS = ("cuda_malloc_async", "cuda_malloc")


def limit_budget(
    model: Any, sample: Any, *, optimizer: Any = None, device: Device | str | None = None
) -> int:
    """Return the bytes that a step may hold in this process, including variables and input.

    On a GPU, TensorFlow's allocator sets the limit.
    """
    if isinstance(device, str) and main_device() == "CPU:0":
        return named(device).usable_bytes
    # The step counts bytes that are already in use: they are added to the free ones.
    held = {id(v): v for v in (*model.variables, *getattr(optimizer, "variables", ()))}
    inputs = [tensor for tensor in tf.nest.flatten(sample) if isinstance(tensor, tf.Tensor)]
    resident = sum(map(bytes_of, (*held.values(), *inputs)))
    if main_device() == "CPU:0":
        return host_budget(resident)
    used = tf.config.experimental.get_memory_info("GPU:0")["current"]
    return int(_limit_bytes() - used + resident)


def bfc_settings(device: Device | str | None) -> BFCSettings | None:
    """Return the allocator's settings on the target GPU; None on a host.

    device : as in `plan`; a name counts if no GPU is here
    """
    if main_device() != "CPU:0":
        gpu = tf.config.list_physical_devices("GPU")[0]
        # TensorFlow ignores memory growth for a GPU that is divided into logical devices.
        divided = tf.config.get_logical_device_configuration(gpu) is not None
        growth = not divided and bool(tf.config.experimental.get_memory_growth(gpu))
        limit = _limit_bytes()
    elif isinstance(device, str) and not is_here(device):
        growth, limit = False, named(device).usable_bytes
    else:
        return None
    return BFCSettings(
        growth=_switch("TF_FORCE_GPU_ALLOW_GROWTH", growth),
        limit_bytes=limit,
        gives_back=_switch("TF_ENABLE_GPU_GARBAGE_COLLECTION", True),
        caching=os.environ.get("TF_GPU_ALLOCATOR") not in _DRIVERS,
    )


def _limit_bytes() -> int:
    """Return the most that TensorFlow's allocator may reserve on the first GPU."""
    # tf.config reports a limit only if the user has set one.
    devices = device_lib.list_local_devices()
    return int(next(entry for entry in devices if entry.device_type == "GPU").memory_limit)


def _switch(name: str, usual: bool) -> bool:
    """Read an environment switch like TensorFlow: ignore values other than true and false."""
    return {"true": True, "false": False}.get(os.environ.get(name, ""), usual)
