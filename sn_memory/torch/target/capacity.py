"""Default budgets of a step, allocator settings, and what FSDP2 gathers."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...cost.caching import AllocatorSettings, Settings
from ...cost.devices import CONTEXT_BYTES, named
from ...graph.records import Device
from ...run.estimate import Units
from ...run.reserved import PlacingSettings, host_budget, left, unknown
from ..model.sharded import here
from ..model.signature import cut_out, storage_sizes, tensors
from ..model.step import device_of
from .accelerator import free_bytes, is_apart
from .allocator import active
from .gpu import gpu_of


def limit_budget(
    model: torch.nn.Module,
    sample: Any,
    *,
    optimizer: Any = None,
    device: Device | str | None = None,
) -> int:
    """Return the bytes that a step may hold in this process, parameters and input included.

    That is what the limits leave, less a margin, plus what of the step exists already: parameters,
    buffers, gradients, the optimizer's state if it is given, the largest sample. On a host the
    limits are RLIMIT_DATA, RLIMIT_AS, those of cgroups, and free memory; the margin is in
    `run/reserved.py`. On a device apart it is the driver's free memory, less `CONTEXT_BYTES` for
    what the driver loads later. Processes that share a limit need a budget each.

    Raises PlanError if no limit is known, or it leaves nothing.
    """
    where = device_of(model)
    if isinstance(device, str) and gpu_of(device, where) is not None:
        return named(device).usable_bytes
    resident = _resident_bytes(model, sample, optimizer, where)
    if where.type == "cpu":
        # Tracing imports it (69 MiB), and that memory is not available to tensors.
        importlib.import_module("torch._dynamo")
        return host_budget(resident)
    free = free_bytes(where) if is_apart(where) else None
    if free is None:
        raise unknown(f"{where}, where torch.{where.type}.mem_get_info was looked for")
    return left(f"free memory of {where} (mem_get_info)", free, CONTEXT_BYTES, resident)


def _resident_bytes(
    model: torch.nn.Module, sample: Any, optimizer: Any, where: torch.device
) -> int:
    """Return the bytes of a step that already exist on a device, each storage once."""
    held = [*model.parameters(), *model.buffers()]
    # `.grad` of a tensor that is not a leaf warns.
    held += [tensor.grad for tensor in held if tensor.is_leaf and tensor.grad is not None]
    held += tensors([*getattr(optimizer, "state", {}).values()])
    samples = sample if isinstance(sample, list) else [sample]
    largest = max((_bytes_on(where, tensors(cut_out(sample))) for sample in samples), default=0)
    return _bytes_on(where, held) + largest


def _bytes_on(where: torch.device, held: list[torch.Tensor]) -> int:
    local = (
        local
        for local in map(here, held)
        if local.device.type == where.type and not isinstance(local, FakeTensor)
    )
    return sum(storage_sizes(local).values())


def units_of(model: torch.nn.Module) -> Units:
    """Return what FSDP2 gathers at once, if each block is wrapped, and then the whole model.

    Blocks are the members of the lists of modules that hold the most parameters.
    """

    def own(module: torch.nn.Module) -> int:
        return sum({id(param): param.nbytes for param in module.parameters()}.values())

    lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1
    ]
    if not lists:
        return Units(0, own(model))
    blocks = max(lists, key=own)
    sizes = [own(block) for block in blocks]
    return Units(max(sizes), max(0, own(model) - sum(sizes)))


def allocator_settings() -> AllocatorSettings:
    """Return the settings of torch's allocator for GPUs in this process."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        text = read()
    else:  # torch before 2.9, which has no way to ask
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        text = next((os.environ[name] for name in names if name in os.environ), "")
    settings = AllocatorSettings.of(text)
    # A separate switch of torch: each tensor is then a driver allocation.
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return replace(settings, caching=False, text="PYTORCH_NO_CUDA_MEMORY_CACHING")
    return settings


def planned_settings() -> Settings:
    """Return the settings of the allocator that plans are made for."""
    return PlacingSettings() if active() else allocator_settings()
