"""Plans for a GPU, present or named: they keep their budget by what TensorFlow's allocator takes.

On a host nothing is different: there the budget is of live bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.client import device_lib

from ..base.sizes import parse_bytes
from ..cost.bfc import BFCSettings
from ..cost.devices import is_here, named
from ..graph.graph import Graph
from ..graph.liveness import unplanned_bytes
from ..graph.records import Device
from ..plan.plan import Plan
from ..run.reserved import within_reserved
from .trace.trace import main_device

# Values of TF_GPU_ALLOCATOR under which the driver serves each request.
_DRIVERS = ("cuda_malloc_async", "cuda_malloc")


def limit_bytes() -> int:
    """Return the most that TensorFlow's allocator may reserve on the first GPU."""
    devices = device_lib.list_local_devices()
    return int(next(one for one in devices if one.device_type == "GPU").memory_limit)


def bfc_settings(device: Device | str | None) -> BFCSettings | None:
    """Return how the allocator of the GPU is set that is planned for; None on a host.

    device : as `plan` has it; a name counts where no GPU is here
    """
    if main_device() != "CPU:0":
        card = tf.config.list_physical_devices("GPU")[0]
        # Of a card that is divided into logical devices TensorFlow forgets that memory may grow.
        divided = tf.config.get_logical_device_configuration(card) is not None
        growth = not divided and bool(tf.config.experimental.get_memory_growth(card))
        limit = limit_bytes()
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


def _switch(name: str, usual: bool) -> bool:
    """Return a switch as TensorFlow reads it: other words than true and false count for nothing."""
    return {"true": True, "false": False}.get(os.environ.get(name, ""), usual)


def plan_on_card(
    plan_graph: Callable[..., Plan],
    graph: Graph,
    budget: float | str,
    *,
    device: Device | str | None,
    time_limit_s: float,
    from_sqrt_n: bool = True,
    **settings: Any,
) -> Plan:
    """Return a plan that keeps a budget: of reserved bytes on a GPU, of live ones elsewhere.

    plan_graph : that of `sn_memory`, whose parameters the others are; and the device of `plan`

    Raises
    ------
    BudgetError
        For a budget that no plan keeps.
    """

    def search(live_bytes: float | str, seconds: float | None) -> Plan:
        return plan_graph(
            graph,
            live_bytes,
            time_limit_s=time_limit_s if seconds is None else min(seconds, time_limit_s),
            from_sqrt_n=from_sqrt_n and seconds is None,
            **settings,
        )

    allocator = bfc_settings(device)
    if allocator is None:
        return search(budget, None)
    allowed = parse_bytes(budget, whole=unplanned_bytes(graph))
    return within_reserved(graph, allowed, search, allocator)
