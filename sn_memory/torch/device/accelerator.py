"""What torch has for a device with memory of its own: `torch.cuda`, `torch.xpu` and their like.

Their modules have the same names for the same things, so nothing here or elsewhere asks which it
is; what only CUDA has (its caching allocator's rounding, cuDNN) is asked for by name where it is.
"""

from __future__ import annotations

import time
from typing import Any

import torch

# Those whose memory is the host's, or nowhere.
_ON_HOST = ("cpu", "meta", "mkldnn", "mps")

# Who counts the memory of a type of device in the place of torch's module; see placing.py.
COUNTED: dict[str, Any] = {}


def is_apart(device: torch.device) -> bool:
    """Whether a device has memory beside the host's."""
    return device.type not in _ON_HOST and hasattr(torch, device.type)


def module_of(device: torch.device) -> Any:
    """Return torch's module of a device that is apart."""
    return getattr(torch, device.type)


def memory_of(device: torch.device) -> Any:
    """Return who counts the memory of a device that is apart, with the functions of its module."""
    return COUNTED.get(device.type) or module_of(device)


def has_streams(device: torch.device) -> bool:
    """Whether copies may run on streams of their own beside the ops of a device."""
    return is_apart(device) and hasattr(module_of(device), "Stream")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if is_apart(device):
        module_of(device).synchronize(device)


def now(device: torch.device) -> float:
    """Return the seconds of a clock, once all before is done."""
    synchronize(device)
    return time.perf_counter()


def chance(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random number generator."""
    if is_apart(device):
        state: torch.Tensor = module_of(device).get_rng_state(device)
        return state
    # By an op, which is seen where storages are counted.
    return torch.get_rng_state().detach()


def set_chance(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's random number generator."""
    if is_apart(device):
        module_of(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def free_bytes(device: torch.device) -> int | None:
    """Return what tensors may still take on a device that is apart; None if it does not say."""
    module = module_of(device)
    if not hasattr(module, "mem_get_info"):
        return None
    memory = memory_of(device)
    kept = memory.memory_reserved(device) - memory.memory_allocated(device)
    free: int = module.mem_get_info(device)[0] + kept
    return free


def kinds() -> tuple[str, ...]:
    """Return the types of devices that may be apart; cheap, as it is asked in each step."""
    return "cuda", "xpu", torch._C._get_privateuse1_backend_name()


def in_use() -> list[str]:
    """Return those of them that this process has begun to use."""
    has_begun = {it: getattr(getattr(torch, it, None), "is_initialized", None) for it in kinds()}
    return [it for it, begun in has_begun.items() if begun is not None and begun()]
