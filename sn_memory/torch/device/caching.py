"""How torch's caching allocator is set in this process, for its rules on paper."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from ...cost.blocks import Settings
from ...cost.caching import AllocatorSettings
from ...run.reserved import PlacingSettings
from . import placing


def allocator_settings() -> AllocatorSettings:
    """Return the settings that allocations on a GPU follow here, or would follow."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        text = read()
    else:  # torch before 2.9, which has no way to ask
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        text = next((os.environ[it] for it in names if it in os.environ), "")
    found = AllocatorSettings.of(text)
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return replace(found, caching=False, text="PYTORCH_NO_CUDA_MEMORY_CACHING")
    return found


def planned_settings() -> Settings:
    """Return the settings of the allocator that plans are made for."""
    return PlacingSettings() if placing.active() else allocator_settings()
